"""PrometheusFile: memory metrics for the textfile collector of node_exporter."""

import logging
from pathlib import Path

from trainer_plugins.printable import printable
from trainer_plugins.record.metrics import MemoryMetrics
from trainer_plugins.record.regular_file import replacing

logger = logging.getLogger(__name__)


class PrometheusFile:
    """Writes the newest metrics of one rank to `<folder>/trainer_plugins-rank-<rank>.prom`.

    Each write replaces the whole file. Metrics have base units and names as Prometheus wants them;
    what a log line sums up since the line before is a counter here. The file stays when the run is
    over, and its age tells so (`node_textfile_mtime_seconds`). If it cannot be written, that is
    logged once and never raised.

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
        """Replace the metrics in the file by these."""
        self._num_alloc_retries += metrics.num_alloc_retries
        self._flush_seconds += metrics.flush_seconds
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # The collector reads every *.prom file, at any time: so replace whole files only.
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
        rows = (
            (
                "peak_bytes",
                "gauge",
                "The most that tensors took at once since the log line before.",
                metrics.peak_bytes,
            ),
            (
                "reserved_bytes",
                "gauge",
                "Held by torch's caching allocator.",
                metrics.reserved_bytes,
            ),
            (
                "foreign_bytes",
                "gauge",
                "Held on the device by other processes.",
                metrics.foreign_bytes,
            ),
            (
                "pressure_ratio",
                "gauge",
                "Peak live memory as a fraction of the device.",
                metrics.pressure_fraction,
            ),
            (
                "alloc_retries_total",
                "counter",
                "Allocations that succeeded only after a flush of the cache.",
                self._num_alloc_retries,
            ),
            (
                "flush_seconds_total",
                "counter",
                "Time that training waited for releases of cached memory.",
                self._flush_seconds,
            ),
        )
        return "".join(
            f"# HELP trainer_plugins_memory_{name} {text}\n"
            f"# TYPE trainer_plugins_memory_{name} {kind}\n"
            f"trainer_plugins_memory_{name}{self._labels} {value}\n"
            for name, kind, text, value in rows
        )
