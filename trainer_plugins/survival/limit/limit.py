"""The limit: how much of a micro-batch fits at once, counted in cells, rows x padded length."""

import math
from collections.abc import Callable, Iterable

import torch

from trainer_plugins.survival.exact.layouts import TOKEN_IDS, Inputs


def cells(inputs: Inputs) -> int:
    """What inputs cost: all their token ids, padding included; where there are none, the size of their largest tensor.

    Memory is not proportional to it, which is why the limit is a guess to start from and every
    piece may fail again.
    """
    tensors = {name: value.numel() for name, value in inputs.items() if torch.is_tensor(value)}
    return sum(num for name, num in tensors.items() if name.endswith(TOKEN_IDS)) or max(
        tensors.values(), default=1
    )


def sizes(num: int, num_cells: int, limit: float, min_micro_batch: int) -> list[int]:
    """Cut examples into parts as even as can be, each within the limit where that leaves `min_micro_batch` in each.

    >>> sizes(8, 8 * 512, 3 * 512, 1), sizes(8, 8 * 512, 3 * 512, 4), sizes(8, 8 * 512, math.inf, 1)
    ([2, 3, 3], [4, 4], [8])
    """
    return even(
        num,
        max(1, min(math.ceil(num / num_that_fit(num, num_cells, limit)), num // min_micro_batch)),
    )


def num_that_fit(num: int, num_cells: int, limit: float) -> int:
    """How many of so many examples of one size are within the limit; one at least.

    A limit that stands for a number of examples is a rounded quotient, so a millionth of one does
    not count.

    >>> num_that_fit(5, 79, 79 * 3 / 5), num_that_fit(6, 600, 299.9)
    (3, 2)
    """
    return num if num_cells <= limit else max(1, int(limit / (num_cells / num) + 1e-6))


def even(num: int, num_parts: int) -> list[int]:
    """Cut examples into so many parts, as even as can be."""
    return [num * (part + 1) // num_parts - num * part // num_parts for part in range(num_parts)]


def lower(num: int, num_cells: int, limit: float, min_micro_batch: int) -> float | None:
    """The limit after so many examples did not fit: half of them.

    None where they cannot be halved.
    """
    if num < 2 * min_micro_batch:
        return None
    return min(limit, num_cells * math.ceil(num / 2) / num)


def most(fits: Callable[[int], bool], num: int, least: int, first: Iterable[int]) -> int:
    """The most of `num` examples that fit at once; 0 where not even `least` do.

    It stops where more would save no piece. A size is asked for once.

    Args:
        fits: whether so many fit.
        num: all of them.
        least: the fewest to ask for, or all of them where there are fewer.
        first: what to ask before halving what is left between.

    >>> most(lambda n: n <= 11, 64, 1, (64,)), most(lambda n: True, 64, 1, (1, 2, 64)), most(lambda n: n < 8, 8, 2, ())
    (11, 64, 7)
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
