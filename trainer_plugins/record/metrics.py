"""Memory use between two log lines of a run, named as in trackers and Prometheus."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from trainer_plugins.printable import printable
from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.folder import place_to_write, replacing
from trainer_plugins.record.timeline import Flush
from trainer_plugins.units import GIB

logger = logging.getLogger(__name__)

# Names and descriptions in a file for Prometheus; sizes are in bytes there.
_IN_PROMETHEUS = {
    "memory/peak_gib": ("peak_bytes", "Peak tensor memory since the last log line."),
    "memory/reserved_gib": ("reserved_bytes", "Held by torch's caching allocator."),
    "memory/foreign_gib": ("foreign_bytes", "Held on the device by other processes."),
    "memory/pressure_fraction": ("pressure_ratio", "Peak live memory as a fraction of the device."),
    "memory/alloc_retries": ("alloc_retries_total", "Allocations that first flushed the cache."),
    "memory/flush_seconds": ("flush_seconds_total", "Time that training waited for releases."),
}


def metrics_of(
    before: MemoryReading,
    readings: Sequence[MemoryReading],
    flushes: Iterable[Flush],
    own_non_torch_bytes: int,
) -> dict[str, float]:
    """Summarize the readings and releases since the previous log line, as trackers show them.

    Args:
        before: the last reading before the previous line.
        readings: the readings since then, one or more.
        flushes: the releases since then.
        own_non_torch_bytes: this run's memory outside torch after warm-up.
    """
    last = readings[-1]
    foreign_bytes = max(0, last.non_torch_bytes - own_non_torch_bytes)
    return {
        "memory/peak_gib": max(reading.peak_allocated_bytes for reading in readings) / GIB,
        "memory/reserved_gib": last.reserved_bytes / GIB,
        "memory/foreign_gib": foreign_bytes / GIB,
        "memory/pressure_fraction": max(reading.pressure for reading in readings),
        "memory/alloc_retries": float(last.num_alloc_retries - before.num_alloc_retries),
        "memory/flush_seconds": float(sum(flush.seconds for flush in flushes)),
    }


class PrometheusFile:
    """Writes the latest metrics of one rank for node_exporter's textfile collector.

    Sums since the previous log line become counters. The file stays after the run: its age shows
    that the run is over (`node_textfile_mtime_seconds`). A failed write is only logged, once.
    """

    def __init__(self, folder: Path, rank: int, device: str) -> None:
        self.path = place_to_write(folder) / f"trainer_plugins-rank-{rank}.prom"
        # Escapes in label values: https://prometheus.io/docs/instrumenting/exposition_formats
        escaped = device.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self._labels = f'{{rank="{rank}",device="{escaped}"}}'
        self._sums = dict.fromkeys(("memory/alloc_retries", "memory/flush_seconds"), 0.0)
        self._warned = False

    def write(self, metrics: Mapping[str, float]) -> None:
        """Write the result of `metrics_of`."""
        for name in self._sums:
            self._sums[name] += metrics[name]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # The collector may read any *.prom file at any time, so replace it atomically.
            with replacing(self.path) as file:
                file.write(self._text(metrics).encode(errors="replace"))
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "memory metrics could not be written to %s (%s): training continues"
                    " without them. Free some space, or set prometheus_dir to a writable"
                    " folder",
                    printable(self.path),
                    error.strerror,
                )

    def _text(self, metrics: Mapping[str, float]) -> str:
        lines = []
        for name, value in {**metrics, **self._sums}.items():
            metric, meaning = _IN_PROMETHEUS[name]
            kind = "counter" if metric.endswith("_total") else "gauge"
            value = round(value * GIB) if metric.endswith("_bytes") else value
            lines += [
                f"# HELP trainer_plugins_memory_{metric} {meaning}\n",
                f"# TYPE trainer_plugins_memory_{metric} {kind}\n",
                f"trainer_plugins_memory_{metric}{self._labels} {value}\n",
            ]
        return "".join(lines)
