"""A card on which a token takes 1 MB, which DeepSpeed finds nowhere on a CPU."""

from tests.survival.ranks.half_full import HalfFull
from trainer_plugins.reading import MemoryReading


class TokenCard(HalfFull):
    """It holds 60 tokens, and that of rank 1 holds 40."""

    def __init__(self, rank: int) -> None:
        self.peak_bytes = 0
        self.total_bytes = (70 if rank == 0 else 50) * 10**6

    def holds(self, num_tokens: int) -> None:
        self.peak_bytes = max(self.peak_bytes, 10**7 + num_tokens * 10**6)

    def read(self) -> MemoryReading:
        held = {
            "free_bytes": self.total_bytes - 10**7,
            "reserved_bytes": 10**7,
            "allocated_bytes": 10**7,
        }
        return MemoryReading(
            device="cpu", total_bytes=self.total_bytes, peak_allocated_bytes=self.peak_bytes, **held
        )

    def reset_peak(self) -> None:
        self.peak_bytes = 0
