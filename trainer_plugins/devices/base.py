"""Device: all that the rest of the package may ask of hardware."""

from dataclasses import dataclass
from typing import Protocol

from trainer_plugins.reading import MemoryReading


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """One process that holds memory on a card, as the driver names it."""

    pid: int
    """In a container this may be the number that the host gave it."""

    used_bytes: int | None
    """None where the driver does not say (MIG, WSL)."""

    name: str | None
    """None where it cannot be found out, as with a pid of another namespace."""


class Device(Protocol):
    """A place where tensors live. Every implementation passes `tests/devices/test_contract.py`."""

    @property
    def name(self) -> str:
        """As torch names it: `cuda:0`, `cpu`."""

    @property
    def uuid(self) -> str | None:
        """The name that stays the same in every process and order: `GPU-…`.

        None where there is none.
        """

    def read(self) -> MemoryReading:
        """Look once. Costs microseconds, allocates nothing on the device, and never waits for it."""

    def reset_peak(self) -> None:
        """Begin a new interval for `peak_allocated_bytes`."""

    def release_cached(self) -> int:
        """Give cached memory back to the device and return how many bytes that was.

        Live tensors are untouched.
        """

    def processes(self) -> tuple[GpuProcess, ...] | None:
        """Who holds memory here, or None where that cannot be known.

        Costs up to milliseconds: ask on suspicion.
        """
