"""Fragmentation: memory that is neither used nor usable, and the retries by which the allocator shows it."""

from trainer_plugins.finding import Finding, Severity
from trainer_plugins.reading import MemoryReading
from trainer_plugins.timeline import Flush
from trainer_plugins.units import percent, size

# The cure named by torch's own out-of-memory message. With max_split_size_mb beside it reserved memory grows without
# bound (pytorch issue #123548), hence "alone".
_REMEDY = "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, alone, before the launch."

STUCK_FRACTION = 0.10


def stuck_memory(flush: Flush, total_bytes: int) -> Finding | None:
    """Judge what a release could not give back: the free parts of segments in which a tensor lives."""
    fraction = flush.stuck_bytes / total_bytes
    if fraction < STUCK_FRACTION:
        return None
    return Finding(
        code="memory-fragmentation",
        severity=Severity.WARNING,
        summary=f"{percent(fraction)} of the device is reserved, unused, and stays so after the cache was released",
        evidence=f"{size(flush.stuck_bytes)} stuck between live tensors at step {flush.step}, of {size(total_bytes)}",
        remedy=_REMEDY,
        amount=float(flush.stuck_bytes),
    )


def allocator_retries(before: MemoryReading, now: MemoryReading) -> Finding | None:
    """Judge allocations that succeeded only after the allocator had flushed everything, since an earlier reading."""
    retries = now.num_alloc_retries - before.num_alloc_retries
    if retries <= 0:
        return None
    return Finding(
        code="allocator-retries",
        severity=Severity.WARNING,
        summary=f"{now.device} is so full that the allocator flushed its whole cache to serve a request",
        evidence=(
            f"{retries} retries after warm-up, each of which waits for the card; peak allocated "
            f"{size(now.peak_allocated_bytes)}, reserved {size(now.reserved_bytes)} of {size(now.total_bytes)}"
        ),
        remedy=f"The next such request may fail. {_REMEDY} Otherwise lower the peak: a smaller micro-batch.",
        amount=float(retries),
    )
