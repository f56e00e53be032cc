"""A MemoryReading holds the memory of one device at one instant."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """Holds what one look at one device showed; all sizes are in bytes.

    Raises:
        ValueError: the numbers cannot be true, such as more free memory than there is.

    ```
    |<------------------------- total ------------------------->|
    | non-torch |<-------------- reserved ------------->|  free |
    |           |<-- allocated -->|<----- cached ------>|       |
    ```
    """

    device: str
    """The device's name as torch writes it: `cuda:0`."""

    total_bytes: int
    """What all processes together can use; a GPU driver's own reserve is not part of it."""

    free_bytes: int
    """Bytes that no process holds."""

    reserved_bytes: int
    """Bytes that this process's caching allocator holds."""

    allocated_bytes: int
    """The part of `reserved_bytes` that live tensors occupy."""

    peak_allocated_bytes: int
    """The most `allocated_bytes` has been since the peak was last reset."""

    num_alloc_retries: int = 0
    """Allocations that succeeded only after a flush of the cache, since the process began."""

    def __post_init__(self) -> None:
        # reserved_bytes may exceed total minus free: the two counters are read a moment apart.
        sizes = (
            self.reserved_bytes,
            self.allocated_bytes,
            self.peak_allocated_bytes,
            self.num_alloc_retries,
        )
        if not 0 <= self.free_bytes <= self.total_bytes or not self.total_bytes or min(sizes) < 0:
            raise ValueError(f"{self.device} reports memory numbers that cannot be true: {self}")

    @property
    def cached_bytes(self) -> int:
        """Return bytes reserved but in no tensor: reusable here, freed by releasing the cache."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def non_torch_bytes(self) -> int:
        """Return bytes neither free nor torch's: CUDA context, NCCL buffers, other processes.

        It is never negative, although the counters behind it are read a moment apart.
        """
        return max(0, self.total_bytes - self.free_bytes - self.reserved_bytes)

    @property
    def headroom_bytes(self) -> int:
        """Return bytes left over at the peak: a step could have been this much larger."""
        return self.total_bytes - self.peak_allocated_bytes - self.non_torch_bytes

    @property
    def pressure(self) -> float:
        """Return the fraction of the device, 0 to 1, that live memory took at its peak.

        It leaves the cache out, because in a healthy run the cache fills the card. It takes the
        peak, because activations are gone between steps.
        """
        return (self.peak_allocated_bytes + self.non_torch_bytes) / self.total_bytes
