"""Halving: cuts a micro-batch into even pieces, and halves the limit after an OOM."""

import math
from collections.abc import Callable, Iterable


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
