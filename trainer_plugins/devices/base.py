"""Device: everything that the rest of the package may ask of hardware."""

from typing import NamedTuple, Protocol

from trainer_plugins.reading import MemoryReading


class GpuProcess(NamedTuple):
    """A process that holds memory on a card, as the driver lists it."""

    pid: int  # in a container it may be the host's
    used_bytes: int | None  # None if the driver does not report it (MIG, WSL)
    name: str | None  # the program's name; None if unknown, as in another pid namespace


class Device(Protocol):
    """Reads the memory that holds tensors; `tests/devices/test_contract.py` is its contract."""

    @property
    def name(self) -> str:
        """Return torch's name for it: `cuda:0`, `cpu`."""

    def read(self) -> MemoryReading:
        """Take a reading in microseconds, without allocating on the device or waiting for it."""

    def reset_peak(self) -> None:
        """Start a new interval for `peak_allocated_bytes`."""

    def release_cached(self) -> int:
        """Return cached memory to the device; return the number of bytes."""

    def processes(self) -> tuple[GpuProcess, ...] | None:
        """List the processes that hold memory here, in up to milliseconds; None if unknown."""
