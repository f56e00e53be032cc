"""MemoryReading: what one device's memory looked like at one instant."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """One look at one device.

    All sizes are in bytes. A device that says what cannot be is refused with a ValueError.

    ```
    |<------------------------- total ------------------------->|
    | non-torch |<-------------- reserved ------------->|  free |
    |           |<-- allocated -->|<----- cached ------>|       |
    ```
    """

    device: str
    """As torch names it: `cuda:0`."""

    total_bytes: int
    """What all processes together can take: on a card without the part that the driver keeps for itself."""

    free_bytes: int
    """Held by no process at all."""

    reserved_bytes: int
    """Held by this process's caching allocator."""

    allocated_bytes: int
    """The part of `reserved_bytes` that live tensors occupy."""

    peak_allocated_bytes: int
    """The most `allocated_bytes` has been since the peak was last reset."""

    num_alloc_retries: int = 0
    """Allocations, since the process began, that succeeded only after the allocator had flushed its cache."""

    def __post_init__(self) -> None:
        # Reserved memory is counted a moment apart, so together with what is free it may exceed the
        # total.
        sizes = (
            self.reserved_bytes,
            self.allocated_bytes,
            self.peak_allocated_bytes,
            self.num_alloc_retries,
        )
        if not 0 <= self.free_bytes <= self.total_bytes or not self.total_bytes or min(sizes) < 0:
            raise ValueError(f"{self.device} says of its memory what cannot be: {self}")

    @property
    def cached_bytes(self) -> int:
        """Reserved, yet under no tensor: reusable here, and given back to the device by a release."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def non_torch_bytes(self) -> int:
        """Neither free nor ours: the CUDA context, NCCL buffers, and other processes.

        Never negative: the counters behind it are read a moment apart.
        """
        return max(0, self.total_bytes - self.free_bytes - self.reserved_bytes)

    @property
    def headroom_bytes(self) -> int:
        """What the peak left: how much larger a step could have been."""
        return self.total_bytes - self.peak_allocated_bytes - self.non_torch_bytes

    @property
    def pressure(self) -> float:
        """The fraction of the device that live memory took at its peak, 0 to 1.

        The cache is left out, because in a healthy run the cache fills the card; and it is the
        peak, because between steps the activations are gone.
        """
        return (self.peak_allocated_bytes + self.non_torch_bytes) / self.total_bytes
