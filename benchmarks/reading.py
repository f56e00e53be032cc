"""What one reading costs, on the card of this machine or on a simulated one, and what it would cost the flat way."""

from time import perf_counter

import torch

from benchmarks.card import card_here
from trainer_plugins.devices import open_device


def microseconds(function: object, times: int = 2000) -> float:
    """Median of 5 means of `times` calls."""
    assert callable(function)
    means = []
    for _ in range(5):
        start = perf_counter()
        for _ in range(times):
            function()
        means.append((perf_counter() - start) / times * 1e6)
    return sorted(means)[2]


def measure() -> dict[str, float]:
    """Microseconds a call, side by side in one process."""
    place = card_here()
    torch.ones(1, device=place)
    card, host = open_device(place), open_device("cpu")
    return {
        f"reading_us[{place}]": microseconds(card.read),
        "reading_us[cpu]": microseconds(host.read, 300),
        f"torch.accelerator.memory_stats_us[{place}]": microseconds(torch.accelerator.memory_stats),
    }


if __name__ == "__main__":
    for name, value in measure().items():
        print(f"{name}: {value:.1f}")
