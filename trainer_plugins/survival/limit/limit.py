"""The limit: how many cells (rows x padded length) fit at once, and when to try fewer or more."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from trainer_plugins.reading import MemoryReading
from trainer_plugins.survival.exact.shares import Inputs

SLACK = 0.05  # fraction of the card left free by a rehearsed limit: fragmentation varies
PATIENCE_STEPS = 50  # steps without a failure before trying more; doubled when that fails
_WORTH = 1.1  # smallest growth of a limit that is worth a failed attempt
# Consecutive steps in which the allocator emptied its cache, as in Composer's trainer.py.
_NUM_THRASHING = 2
_TOKEN_IDS = ("input_ids", "prompt_ids", "completion_ids")  # name endings


def has_tokens(inputs: Inputs) -> bool:
    """Return whether a micro-batch holds token ids."""
    return any(name.endswith(_TOKEN_IDS) for name in inputs)


def cells(inputs: Inputs) -> int:
    """Return the cost of inputs: all token ids, padding included, or else their largest tensor."""
    tensors = {name: value.numel() for name, value in inputs.items() if torch.is_tensor(value)}
    return sum(num for name, num in tensors.items() if name.endswith(_TOKEN_IDS)) or max(
        tensors.values(), default=1
    )


def read_allowed_bytes(reading: MemoryReading, device: torch.device) -> int:
    """Return the bytes torch may use on a card: all, or `set_per_process_memory_fraction`."""
    module = torch.get_device_module(device)
    if not hasattr(module, "get_per_process_memory_fraction"):  # for example the CPU
        return reading.total_bytes
    return int(min(1.0, module.get_per_process_memory_fraction(device)) * reading.total_bytes)


def predict_peak(peaks: Sequence[tuple[float, int]], size: float) -> float:
    """Predict the peak bytes of a size from the line through the last two peaks; 0 without two.

    >>> predict_peak([(1, 30), (2, 50)], 8), predict_peak([(1, 30)], 8)
    (170.0, 0.0)
    """
    if len(peaks) < 2:
        return 0.0
    (small, low), (large, high) = sorted(peaks)[-2:]
    return low + (size - small) * (high - low) / (large - small)


def sizes(num: int, num_cells: int, limit: float, min_micro_batch: int) -> list[int]:
    """Cut examples into even parts within the limit, with at least `min_micro_batch` in each.

    >>> sizes(8, 8 * 512, 3 * 512, 1), sizes(8, 8 * 512, 3 * 512, 4), sizes(8, 8 * 512, math.inf, 1)
    ([2, 3, 3], [4, 4], [8])
    """
    num_parts = math.ceil(num / num_that_fit(num, num_cells, limit))
    return even(num, max(1, min(num_parts, num // min_micro_batch)))


def num_that_fit(num: int, num_cells: int, limit: float) -> int:
    """Return how many of `num` examples of one size are within the limit; at least 1.

    >>> num_that_fit(5, 79, 79 * 3 / 5), num_that_fit(6, 600, 299.9)
    (3, 2)
    """
    # A limit that stands for examples is a rounded quotient: ignore a millionth of an example.
    return num if num_cells <= limit else max(1, int(limit / (num_cells / num) + 1e-6))


def even(num: int, num_parts: int) -> list[int]:
    """Cut `num` examples into `num_parts` parts, as evenly as possible."""
    return [num * (part + 1) // num_parts - num * part // num_parts for part in range(num_parts)]


def lower(num: int, num_cells: int, limit: float, min_micro_batch: int) -> float | None:
    """Return the limit after `num` examples did not fit: half of them; None if that is too few."""
    if num < 2 * min_micro_batch:
        return None
    return min(limit, num_cells * math.ceil(num / 2) / num)


def most(fits: Callable[[int], bool], num: int, least: int, first: Iterable[int]) -> int:
    """Return how many of `num` examples fit at once, trying `first` first; 0 below `least`.

    >>> most(lambda n: n <= 11, 64, 1, (64,)), most(lambda n: True, 64, 1, (1, 2, 64))
    (11, 64)
    >>> most(lambda n: n < 8, 8, 2, ()), most(lambda n: True, 4, 8, (4,))
    (7, 4)
    >>> most(lambda n: False, 8, 2, (8,))
    0
    """
    least = min(least, num)
    low, high = least - 1, num + 1
    guesses = iter(first)
    while high - low > 1 and (low < least or math.ceil(num / low) > math.ceil(num / (high - 1))):
        size = next((guess for guess in guesses if low < guess < high), (low + high) // 2)
        if fits(size):
            low = size
        else:
            high = size
    return low if low >= least else 0


@dataclass(slots=True)
class Pace:
    """Decides between steps whether the limit may grow, as after halving, or must shrink."""

    fits: float = 0.0  # the limit before it grew; 0 if it never did
    # The smallest size that did not fit, forgotten when the limit has come near it. Each attempt
    # that fails because of that doubles the patience: at most log2(n / 50) fail in n steps.
    too_much: float = math.inf
    patience_steps: int = PATIENCE_STEPS
    num_clean: int = 0
    has_failed: bool = False
    is_divided: bool = False
    largest: int = 0  # largest size computed at once in this step
    num_retries: int = 0
    num_thrashing: int = 0
    ceiling: float = math.inf  # the limit that a rehearsal found, never exceeded

    def note_failure(self, num_cells: int, lowered: float) -> float:
        """Record a failed size; return the last limit that fitted, or else `lowered`."""
        self.has_failed, self.num_clean = True, 0
        self.too_much = min(self.too_much, num_cells)
        if not 0 < self.fits < num_cells:
            return lowered
        limit, self.fits = self.fits, 0.0
        self.patience_steps *= 2
        return limit

    def note_computed(self, num_cells: int, is_divided: bool) -> None:
        self.largest = max(self.largest, num_cells)
        self.is_divided |= is_divided

    def adapt(self, limit: float, num_retries: int) -> tuple[float, bool]:
        """Return the limit from now on, and whether it was lowered because of the allocator."""
        retried, self.num_retries = num_retries > self.num_retries, num_retries
        self.num_thrashing = self.num_thrashing + 1 if retried and not self.has_failed else 0
        largest, is_clean = self.largest, self.is_divided and not self.has_failed
        self.has_failed, self.is_divided, self.largest = False, False, 0
        if self.num_thrashing == _NUM_THRASHING and largest:
            self.num_thrashing = self.num_clean = 0
            self.too_much = min(self.too_much, largest)
            return min(limit, largest / 2), True
        self.num_clean += is_clean
        if self.num_clean < self.patience_steps or math.isinf(limit):
            return limit, False
        self.num_clean = 0
        more = 2 * limit if math.isinf(self.too_much) else (limit + self.too_much) / 2
        if more < _WORTH * limit:
            self.too_much = self.ceiling  # another process's memory may be free by now
            return limit, False
        self.fits = limit
        return more, False
