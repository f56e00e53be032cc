"""A device of which a test says what it holds, for stories about numbers that no card here shows."""

from trainer_plugins.reading import MemoryReading
from trainer_plugins.units import GIB


class SaidDevice:
    """A card of which a sixteenth is live and as much cached; `non_torch_bytes` may be set at any time."""

    def __init__(
        self, name: str = "cuda:0", non_torch_bytes: int = 0, total_bytes: int = 80 * GIB
    ) -> None:
        self.name = name
        self.total_bytes = total_bytes
        self.non_torch_bytes = non_torch_bytes
        self.num_releases = 0

    def read(self) -> MemoryReading:
        live_bytes = self.total_bytes // 16
        return MemoryReading(
            device=self.name,
            total_bytes=self.total_bytes,
            free_bytes=self.total_bytes - 2 * live_bytes - self.non_torch_bytes,
            reserved_bytes=2 * live_bytes,
            allocated_bytes=live_bytes,
            peak_allocated_bytes=live_bytes,
        )

    def reset_peak(self) -> None: ...

    def release_cached(self) -> int:
        self.num_releases += 1
        return 0

    def processes(self) -> None:
        return None
