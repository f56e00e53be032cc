"""Pinned memory: what torch takes of main memory for a tensor that cannot be swapped."""


def block_bytes(num_bytes: int) -> int:
    """Return the power of two that torch pins for a tensor and keeps (CachingHostAllocator.h)."""
    return 1 << max(0, num_bytes - 1).bit_length()
