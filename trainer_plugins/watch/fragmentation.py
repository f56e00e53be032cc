"""Finds fragmentation: reserved memory that fits no request, and the retries that it causes."""

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.finding import Finding
from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.timeline import Flush
from trainer_plugins.units import percent, size

STUCK_FRACTION = 0.10


def against_fragmentation(is_expandable: bool) -> str:
    """Return the remedy for fragmentation, depending on whether segments are expandable already."""
    padding = advice.PAD_TO_FEW_LENGTHS.flag(Door.ARGUMENTS)
    if is_expandable:
        return (
            f"Pad to a few lengths ({padding}), so that freed blocks can be reused; segments"
            " are already expandable."
        )
    setting = advice.EXPANDABLE_SEGMENTS.flag(Door.ENVIRONMENT)
    return f"Set {setting}, alone, before the launch, or pad to a few lengths ({padding})."


def stuck_memory(flush: Flush, total_bytes: int, *, is_expandable: bool = False) -> Finding | None:
    """Judge the cache that a release could not free: its segments also hold live tensors."""
    fraction = flush.stuck_bytes / total_bytes
    if fraction < STUCK_FRACTION:
        return None
    return Finding.warning(
        code="memory-fragmentation",
        summary=f"{percent(fraction)} of the device is reserved but unused, even after the cache"
        " was released",
        evidence=f"{size(flush.stuck_bytes)} stuck between live tensors at step {flush.step}, of"
        f" {size(total_bytes)}",
        remedy=against_fragmentation(is_expandable),
        amount=float(flush.stuck_bytes),
        data={"stuck_bytes": flush.stuck_bytes, "total_bytes": total_bytes, "step": flush.step},
    )


def allocator_retries(
    before: MemoryReading, now: MemoryReading, *, is_expandable: bool = False
) -> Finding | None:
    """Judge allocations since an earlier reading that succeeded only after flushing the cache."""
    retries = now.num_alloc_retries - before.num_alloc_retries
    if retries <= 0:
        return None
    # Some of it may be released by now, but the peak was reserved at least.
    reserved_bytes = max(now.reserved_bytes, now.peak_allocated_bytes)
    return Finding.warning(
        code="allocator-retries",
        summary=f"{now.device} is so full that the allocator had to flush its entire cache",
        evidence=f"{retries} retries after warm-up, each of which waits for the card; peak"
        f" allocated {size(now.peak_allocated_bytes)}, reserved {size(reserved_bytes)} of"
        f" {size(now.total_bytes)}",
        remedy=f"The next such request may fail. {against_fragmentation(is_expandable)} If that"
        " does not help, lower the peak: use a smaller micro-batch.",
        amount=float(retries),
        data={
            "num_retries": retries,
            "peak_allocated_bytes": now.peak_allocated_bytes,
            "reserved_bytes": reserved_bytes,
            "total_bytes": now.total_bytes,
        },
    )
