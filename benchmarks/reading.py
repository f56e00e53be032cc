"""Measure one reading, on this machine's card or a simulated one, next to the naive way.

Also measure its line in the timeline: in a short file, and in one so long that it is thinned.
"""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

import torch

from benchmarks.card import card_here
from trainer_plugins.devices.accelerator import open_device
from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.timeline import Sample, Timeline


def microseconds(function: object, times: int = 2000) -> float:
    """Return the median of 5 means of `times` calls, in microseconds."""
    assert callable(function)
    means = []
    for _ in range(5):
        start = perf_counter()
        for _ in range(times):
            function()
        means.append((perf_counter() - start) / times * 1e6)
    return sorted(means)[2]


def entry_microseconds(reading: MemoryReading, num: int) -> float:
    """Return an entry's mean processor time in microseconds; each entry has another peak."""
    with TemporaryDirectory() as folder:
        timeline = Timeline(Path(folder) / "rank-0.jsonl")
        start = process_time()
        for step in range(num):
            peak = replace(
                reading, peak_allocated_bytes=reading.peak_allocated_bytes + step * 7919 % 1_000_003
            )
            timeline.add(Sample(step=step, moment="train", reading=peak))
        return (process_time() - start) / num * 1e6


def measure() -> dict[str, float]:
    """Return microseconds per call, measured side by side in one process."""
    place = card_here()
    torch.ones(1, device=place)
    card, host = open_device(place), open_device("cpu")
    return {
        f"reading_us[{place}]": microseconds(card.read),
        "reading_us[cpu]": microseconds(host.read, 300),
        f"torch.accelerator.memory_stats_us[{place}]": microseconds(torch.accelerator.memory_stats),
        "timeline_entry_us": entry_microseconds(card.read(), 20_000),
        "timeline_entry_us[of 100,000, with thinning]": entry_microseconds(card.read(), 100_000),
    }


if __name__ == "__main__":
    for name, value in measure().items():
        print(f"{name}: {value:.1f}")
