"""The memory use between two lines of a run's log, under its names in trackers and Prometheus."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer_plugins.printable import printable
from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.folder import place_to_write, replacing
from trainer_plugins.record.timeline import Flush
from trainer_plugins.units import GIB

logger = logging.getLogger(__name__)

_HELP = {
    "peak_bytes": "The most that tensors took at once since the log line before.",
    "reserved_bytes": "Held by torch's caching allocator.",
    "foreign_bytes": "Held on the device by other processes.",
    "pressure_ratio": "Peak live memory as a fraction of the device.",
    "alloc_retries_total": "Allocations that succeeded only after a flush of the cache.",
    "flush_seconds_total": "Time that training waited for releases of cached memory.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryMetrics:
    """Holds the memory of one rank's device since the previous log line; sizes in bytes."""

    peak_bytes: int  # the peak of tensors, in training, evaluation or save
    reserved_bytes: int  # what this process's caching allocator held at the last reading
    # Outside torch at the last reading, minus what this run took there while it warmed up.
    foreign_bytes: int
    pressure_fraction: float  # the highest pressure (see `MemoryReading`), 0 to 1
    num_alloc_retries: int  # allocations that needed a flush of the allocator's cache
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


class PrometheusFile:
    """Writes the newest metrics of one rank for node_exporter's textfile collector.

    Sums since the previous log line become counters. The file stays after the run: its age shows
    that it is over (`node_textfile_mtime_seconds`). A failed write is logged once, never raised.
    """

    def __init__(self, folder: Path, rank: int, device: str) -> None:
        self.path = place_to_write(folder) / f"trainer_plugins-rank-{rank}.prom"
        # Escapes in label values: https://prometheus.io/docs/instrumenting/exposition_formats
        escaped = device.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self._labels = f'{{rank="{rank}",device="{escaped}"}}'
        self._num_alloc_retries = 0
        self._flush_seconds = 0.0
        self._warned = False

    def write(self, metrics: MemoryMetrics) -> None:
        self._num_alloc_retries += metrics.num_alloc_retries
        self._flush_seconds += metrics.flush_seconds
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # The collector may read any *.prom file at any time, so replace it atomically.
            with replacing(self.path) as file:
                file.write(self._text(metrics).encode(errors="replace"))
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "memory metrics cannot be written to %s (%s): training goes on without them."
                    " Free some space, or set prometheus_dir to a writable folder",
                    printable(self.path),
                    error.strerror,
                )

    def _text(self, metrics: MemoryMetrics) -> str:
        values = {
            "peak_bytes": metrics.peak_bytes,
            "reserved_bytes": metrics.reserved_bytes,
            "foreign_bytes": metrics.foreign_bytes,
            "pressure_ratio": metrics.pressure_fraction,
            "alloc_retries_total": self._num_alloc_retries,
            "flush_seconds_total": self._flush_seconds,
        }
        return "".join(
            f"# HELP trainer_plugins_memory_{name} {_HELP[name]}\n"
            f"# TYPE trainer_plugins_memory_{name}"
            f" {'counter' if name.endswith('_total') else 'gauge'}\n"
            f"trainer_plugins_memory_{name}{self._labels} {value}\n"
            for name, value in values.items()
        )
