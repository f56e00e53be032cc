"""PrometheusFile: memory metrics where the textfile collector of node_exporter finds them."""

import logging
from pathlib import Path

from trainer_plugins.printable import printable
from trainer_plugins.record.metrics import MemoryMetrics
from trainer_plugins.record.regular_file import replacing

logger = logging.getLogger(__name__)


class PrometheusFile:
    """The newest metrics of one rank: `<folder>/trainer_plugins-rank-<rank>.prom`, replaced as a whole at each write.

    Base units, and names as Prometheus wants them: what a log line sums up since the one before is
    a counter here. The file stays when the run is over; its age tells
    (`node_textfile_mtime_seconds`). One that cannot be written is said once and never raised.

    Source: https://github.com/prometheus/node_exporter#textfile-collector
    """

    def __init__(self, folder: Path, rank: int, device: str) -> None:
        self.path = folder / f"trainer_plugins-rank-{rank}.prom"
        # https://prometheus.io/docs/instrumenting/exposition_formats: what is escaped in the value
        # of a label
        escaped = device.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self._labels = f'{{rank="{rank}",device="{escaped}"}}'
        self._num_alloc_retries = 0
        self._flush_seconds = 0.0
        self._warned = False

    def write(self, metrics: MemoryMetrics) -> None:
        """Put these metrics in the place of those before."""
        self._num_alloc_retries += metrics.num_alloc_retries
        self._flush_seconds += metrics.flush_seconds
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # The collector reads *.prom and nothing else, at any time: so a whole file takes the
            # place of a whole file.
            with replacing(self.path) as file:
                file.write(self._text(metrics).encode(errors="replace"))
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "memory metrics cannot be written to %s (%s): training goes on without them. Free some space, or "
                    "set prometheus_dir to a folder that can be written",
                    printable(self.path),
                    error.strerror,
                )

    def _text(self, metrics: MemoryMetrics) -> str:
        rows = (
            (
                "peak_bytes",
                "gauge",
                "Most that tensors took at once since the log line before.",
                metrics.peak_bytes,
            ),
            (
                "reserved_bytes",
                "gauge",
                "Held by the caching allocator of torch.",
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
                "Live memory at its peak, of the device.",
                metrics.pressure_fraction,
            ),
            (
                "alloc_retries_total",
                "counter",
                "Allocations that needed a flush.",
                self._num_alloc_retries,
            ),
            (
                "flush_seconds_total",
                "counter",
                "Waited for releases of cached memory.",
                self._flush_seconds,
            ),
        )
        return "".join(
            f"# HELP trainer_plugins_memory_{name} {text}\n"
            f"# TYPE trainer_plugins_memory_{name} {kind}\n"
            f"trainer_plugins_memory_{name}{self._labels} {value}\n"
            for name, kind, text, value in rows
        )
