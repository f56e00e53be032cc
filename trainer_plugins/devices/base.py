"""Device: everything that the rest of the package may ask of hardware."""

from dataclasses import dataclass
from typing import Protocol

from trainer_plugins.reading import MemoryReading


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """Describes a process that holds memory on a card, as the driver lists it."""

    pid: int  # the process id; in a container it may be the host's
    used_bytes: int | None  # bytes that it holds; None if the driver does not say (MIG, WSL)
    name: str | None  # the program's name; None if unknown, as in another pid namespace


class Device(Protocol):
    """Reads the memory where tensors live; `tests/devices/test_contract.py` is its contract."""

    @property
    def name(self) -> str:
        """Return torch's name for it: `cuda:0`, `cpu`."""

    @property
    def uuid(self) -> str | None:
        """Return the driver's name for it, the same in every process: `GPU-…`; None without one."""

    def read(self) -> MemoryReading:
        """Take a reading in microseconds; allocate nothing on the device, never wait for it."""

    def reset_peak(self) -> None:
        """Start a new interval for `peak_allocated_bytes`."""

    def release_cached(self) -> int:
        """Return cached memory to the device, and say how many bytes that was."""

    def processes(self) -> tuple[GpuProcess, ...] | None:
        """List, in up to milliseconds, the processes that hold memory here; None if unknown."""
