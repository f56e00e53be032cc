"""Device: everything that the rest of the package may ask of hardware."""

from dataclasses import dataclass
from typing import Protocol

from trainer_plugins.reading import MemoryReading


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """Describes a process that holds memory on a card, as the driver lists it."""

    pid: int
    """The process id; inside a container this may be the host's number for it."""

    used_bytes: int | None
    """Bytes that it holds; None if the driver does not tell (MIG, WSL)."""

    name: str | None
    """The program's name; None if unknown, as for a pid of another namespace."""


class Device(Protocol):
    """Reads where tensors live; every implementation passes `tests/devices/test_contract.py`."""

    @property
    def name(self) -> str:
        """Return the name that torch gives it: `cuda:0`, `cpu`."""

    @property
    def uuid(self) -> str | None:
        """Return the name that is the same in every process, `GPU-…`; None if it has none."""

    def read(self) -> MemoryReading:
        """Look once. Takes microseconds, allocates nothing on the device, never waits for it."""

    def reset_peak(self) -> None:
        """Start a new interval for `peak_allocated_bytes`."""

    def release_cached(self) -> int:
        """Give cached memory back to the device and return how many bytes that was.

        Live tensors are untouched.
        """

    def processes(self) -> tuple[GpuProcess, ...] | None:
        """List who holds memory here; None if that cannot be known.

        Takes up to milliseconds, so ask only on suspicion.
        """
