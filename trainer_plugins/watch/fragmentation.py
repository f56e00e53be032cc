"""Finds fragmentation: reserved memory that no request fits into, and retries caused by it."""

from trainer_plugins.finding import Finding, Severity
from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.timeline import Flush
from trainer_plugins.units import percent, size

STUCK_FRACTION = 0.10


def against_fragmentation(is_expandable: bool) -> str:
    """Say what reduces fragmentation, depending on whether expandable segments are in use."""
    if is_expandable:
        return (
            "Pad to a few lengths (pad_to_multiple_of=64), so that freed blocks fit again;"
            " expandable_segments is set already."
        )
    # torch's own out-of-memory message names this setting. It must be set alone: together with
    # max_split_size_mb reserved memory grows without bound (pytorch issue #123548).
    return (
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, alone, before the launch, or pad to"
        " a few lengths (pad_to_multiple_of=64)."
    )


def stuck_memory(flush: Flush, total_bytes: int, *, is_expandable: bool = False) -> Finding | None:
    """Judge what a release could not free: cached memory in segments that also hold live tensors.

    Args:
        flush: the release.
        total_bytes: the device's memory.
        is_expandable: whether torch was told to use expandable segments.
    """
    fraction = flush.stuck_bytes / total_bytes
    if fraction < STUCK_FRACTION:
        return None
    return Finding(
        code="memory-fragmentation",
        severity=Severity.WARNING,
        summary=f"{percent(fraction)} of the device is reserved but unused, even after the cache"
        " was released",
        evidence=f"{size(flush.stuck_bytes)} stuck between live tensors at step {flush.step}, of"
        f" {size(total_bytes)}",
        remedy=against_fragmentation(is_expandable),
        amount=float(flush.stuck_bytes),
    )


def allocator_retries(
    before: MemoryReading, now: MemoryReading, *, is_expandable: bool = False
) -> Finding | None:
    """Judge allocations since an earlier reading that succeeded only after the cache was flushed.

    Args:
        before: the earlier reading.
        now: the reading to judge.
        is_expandable: whether torch was told to use expandable segments.
    """
    retries = now.num_alloc_retries - before.num_alloc_retries
    if retries <= 0:
        return None
    return Finding(
        code="allocator-retries",
        severity=Severity.WARNING,
        summary=f"{now.device} is so full that the allocator had to flush its entire cache",
        evidence=f"{retries} retries after warm-up, each of which waits for the card; peak"
        f" allocated {size(now.peak_allocated_bytes)}, reserved {size(now.reserved_bytes)} of"
        f" {size(now.total_bytes)}",
        remedy=f"The next such request may fail. {against_fragmentation(is_expandable)} If that"
        " does not help, lower the peak: use a smaller micro-batch.",
        amount=float(retries),
    )
