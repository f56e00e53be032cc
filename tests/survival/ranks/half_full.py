"""A card for ranks on the CPU, which have none."""

from trainer_plugins.reading import MemoryReading


class HalfFull:
    """What a reading finds on it; who wants something not to fit says so in a subclass."""

    def read(self) -> MemoryReading:
        half = {"free_bytes": 5 * 10**8, "reserved_bytes": 5 * 10**8, "allocated_bytes": 5 * 10**8}
        return MemoryReading(
            device="cpu", total_bytes=10**9, peak_allocated_bytes=5 * 10**8, **half
        )

    def read_allocated_bytes(self) -> int:
        return self.read().allocated_bytes

    def reset_peak(self) -> None:
        pass

    def release_cached(self) -> int:
        return 0
