"""A MemoryReading holds the memory of one device at one instant."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """Holds one reading of one device in bytes, and refuses numbers that cannot be true."""

    device: str  # the device's name as torch writes it: `cuda:0`
    total_bytes: int  # usable by all processes together, without the GPU driver's own reserve
    free_bytes: int  # bytes not used by any process
    reserved_bytes: int  # bytes that this process's caching allocator holds
    allocated_bytes: int  # the part of `reserved_bytes` that live tensors occupy
    peak_allocated_bytes: int  # the highest `allocated_bytes` since the peak was last reset
    num_alloc_retries: int = 0  # allocations of this process that needed a flush of the cache

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
        """Return the bytes reserved but in no tensor; releasing the cache frees them."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def non_torch_bytes(self) -> int:
        """Return bytes neither free nor torch's: CUDA context, NCCL buffers, other processes."""
        # The counters are read a moment apart, so the difference may come out negative.
        return max(0, self.total_bytes - self.free_bytes - self.reserved_bytes)

    @property
    def headroom_bytes(self) -> int:
        """Return the bytes still unused at the peak."""
        return self.total_bytes - self.peak_allocated_bytes - self.non_torch_bytes

    @property
    def pressure(self) -> float:
        """Return the fraction of the device, 0 to 1, that live memory used at its peak.

        The cache does not count: in a healthy run it fills the card. The peak counts because
        activations are freed between steps.
        """
        return (self.peak_allocated_bytes + self.non_torch_bytes) / self.total_bytes
