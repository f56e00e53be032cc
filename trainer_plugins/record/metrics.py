"""MemoryMetrics: the memory use between two lines of a run's log, as a few numbers for charts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.timeline import Flush
from trainer_plugins.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryMetrics:
    """Holds the memory of one rank's device since the previous log line; sizes in bytes."""

    peak_bytes: int  # the peak of tensors, in training, evaluation or save
    reserved_bytes: int  # what this process's caching allocator held at the last reading
    foreign_bytes: int
    # outside torch at the last reading, minus what this run took there while it warmed up

    pressure_fraction: float  # the highest pressure (see `MemoryReading`), 0 to 1
    num_alloc_retries: int
    """Allocations that succeeded only after the allocator had flushed its cache."""

    flush_seconds: float  # how long training waited for releases of cached memory


def metrics_of(
    before: MemoryReading,
    readings: Sequence[MemoryReading],
    flushes: Iterable[Flush],
    own_non_torch_bytes: int,
) -> MemoryMetrics:
    """Sum up the readings and releases since the previous log line, which saw `before`."""
    last = readings[-1]
    return MemoryMetrics(
        peak_bytes=max(reading.peak_allocated_bytes for reading in readings),
        reserved_bytes=last.reserved_bytes,
        foreign_bytes=max(0, last.non_torch_bytes - own_non_torch_bytes),
        pressure_fraction=max(reading.pressure for reading in readings),
        num_alloc_retries=last.num_alloc_retries - before.num_alloc_retries,
        flush_seconds=sum(flush.seconds for flush in flushes),
    )


def as_logs(metrics: MemoryMetrics) -> dict[str, float]:
    """Return the metrics under the names and in the units that trackers show."""
    return {
        "memory/peak_gib": metrics.peak_bytes / GIB,
        "memory/reserved_gib": metrics.reserved_bytes / GIB,
        "memory/foreign_gib": metrics.foreign_bytes / GIB,
        "memory/pressure_fraction": metrics.pressure_fraction,
        "memory/alloc_retries": float(metrics.num_alloc_retries),
        "memory/flush_seconds": float(metrics.flush_seconds),
    }
