"""PrometheusFile: memory metrics for the textfile collector of node_exporter."""

import logging
from pathlib import Path

from trainer_plugins.printable import printable
from trainer_plugins.record.folder import replacing
from trainer_plugins.record.metrics import MemoryMetrics

logger = logging.getLogger(__name__)

_HELP = {
    "peak_bytes": "The most that tensors took at once since the log line before.",
    "reserved_bytes": "Held by torch's caching allocator.",
    "foreign_bytes": "Held on the device by other processes.",
    "pressure_ratio": "Peak live memory as a fraction of the device.",
    "alloc_retries_total": "Allocations that succeeded only after a flush of the cache.",
    "flush_seconds_total": "Time that training waited for releases of cached memory.",
}


class PrometheusFile:
    """Writes the newest metrics of one rank to `<folder>/trainer_plugins-rank-<rank>.prom`.

    Sums since the previous log line become counters. The file stays after the run: its age shows
    that it is over (`node_textfile_mtime_seconds`). A failed write is logged once, never raised.
    Source: https://github.com/prometheus/node_exporter#textfile-collector
    """

    def __init__(self, folder: Path, rank: int, device: str) -> None:
        self.path = folder / f"trainer_plugins-rank-{rank}.prom"
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
