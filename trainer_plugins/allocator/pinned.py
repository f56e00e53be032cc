"""Pinned memory: what torch takes of main memory for a tensor that cannot be swapped."""


def block_bytes(num_bytes: int) -> int:
    """Return the size of the block of a pinned tensor: the next power of two.

    torch keeps the block for the next tensor of this size, and never gives it back by itself
    (ATen/core/CachingHostAllocator.h, `allocate`: PowerOf2Ceil, and free lists by that size).
    """
    return 1 << max(0, num_bytes - 1).bit_length()
