"""The limit: how much of a micro-batch fits at once, counted in cells, rows x padded length."""

import math
from collections.abc import Callable, Iterable

import torch

from trainer_plugins.survival.exact.layouts import TOKEN_IDS, Inputs

SLACK = 0.05
"""Part of the card that a rehearsed limit leaves free, because fragmentation varies."""


def cells(inputs: Inputs) -> int:
    """Return what inputs cost: all their token ids, padding included.

    Inputs without token ids count as their largest tensor. Memory is not proportional to it: the
    limit is a first guess, and every piece may fail again.
    """
    tensors = {name: value.numel() for name, value in inputs.items() if torch.is_tensor(value)}
    return sum(num for name, num in tensors.items() if name.endswith(TOKEN_IDS)) or max(
        tensors.values(), default=1
    )


def sizes(num: int, num_cells: int, limit: float, min_micro_batch: int) -> list[int]:
    """Cut examples into even parts within the limit, but with at least `min_micro_batch` in each.

    >>> sizes(8, 8 * 512, 3 * 512, 1), sizes(8, 8 * 512, 3 * 512, 4), sizes(8, 8 * 512, math.inf, 1)
    ([2, 3, 3], [4, 4], [8])
    """
    return even(
        num,
        max(1, min(math.ceil(num / num_that_fit(num, num_cells, limit)), num // min_micro_batch)),
    )


def num_that_fit(num: int, num_cells: int, limit: float) -> int:
    """Return how many of `num` examples of one size are within the limit; at least 1.

    A limit that stands for a number of examples is a rounded quotient, so a millionth of one does
    not count.

    >>> num_that_fit(5, 79, 79 * 3 / 5), num_that_fit(6, 600, 299.9)
    (3, 2)
    """
    return num if num_cells <= limit else max(1, int(limit / (num_cells / num) + 1e-6))


def even(num: int, num_parts: int) -> list[int]:
    """Cut examples into so many parts, as evenly as possible."""
    return [num * (part + 1) // num_parts - num * part // num_parts for part in range(num_parts)]


def lower(num: int, num_cells: int, limit: float, min_micro_batch: int) -> float | None:
    """Return the limit after `num` examples did not fit: half of them; None if that is too few."""
    if num < 2 * min_micro_batch:
        return None
    return min(limit, num_cells * math.ceil(num / 2) / num)


def most(fits: Callable[[int], bool], num: int, least: int, first: Iterable[int]) -> int:
    """Find the most of `num` examples that fit at once; 0 if not even `least` do.

    It stops when more would save no piece. Each size is asked for once.

    Args:
        fits: whether so many fit.
        num: how many examples there are.
        least: the fewest to ask for; all of them if there are fewer.
        first: the sizes to ask for before the interval is halved.

    >>> most(lambda n: n <= 11, 64, 1, (64,)), most(lambda n: True, 64, 1, (1, 2, 64))
    (11, 64)
    >>> most(lambda n: n < 8, 8, 2, ())
    7
    >>> most(lambda n: False, 8, 2, (8,)), most(lambda n: True, 4, 8, (4,))
    (0, 4)
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
