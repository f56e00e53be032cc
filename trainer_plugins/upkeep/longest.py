"""Finds the rows of a data set that will need the most memory, without computing."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

MAX_ROWS = 1024
"""How many rows, evenly spaced, are looked at if no column tells their lengths."""

_MAX_COUNTED = 1_000_000
_SLICE = 10_000


class LongestRows:
    """Collates the longest rows of a data set as its loader would, and consumes none of them.

    Args:
        dataset: the data set that the loader reads.
        collate: makes a batch of rows. It is copied, since it may keep a generator of its own.
        num: how many rows make a batch; there may be fewer.
        model: is not copied where the collator keeps it, as that of seq2seq does.
    """

    def __init__(self, dataset: Any, collate: Any, num: int, model: nn.Module) -> None:
        self._dataset = dataset
        self._rows = longest_rows(dataset, num) if collate is not None else []
        self._collate = copy.deepcopy(collate, {id(module): module for module in model.modules()})

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, num: int) -> Any:
        """Collate the longest ones; the short one, which is padded, is the last of all."""
        return self._collate([self._dataset[index] for index in self._rows[:num]])


def longest_rows(dataset: Any, num: int) -> list[int]:
    """Return the indices of the longest rows, and last of all that of the shortest.

    The shortest row makes a batch that is padded, as most in training are. Models take a cheaper
    path if nothing is padded, and a rehearsal on that would promise too much. Lengths are read from
    a `length` column, or from the offsets of an arrow table, without decoding; of other data sets
    up to `MAX_ROWS` rows are fetched. A data set that cannot be asked for a row without consuming
    it gives an empty list.

    Args:
        dataset: the data set that the training reads.
        num: how many rows are wanted; there may be fewer.
    """
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")) or len(dataset) == 0:
        return []
    lengths = lengths_of(dataset)
    order = sorted(lengths, key=lambda index: -lengths[index])[: max(1, num)]
    if num > 1:
        order[min(num, len(order)) - 1 :] = [min(lengths, key=lambda index: lengths[index])]
    return order


def lengths_of(dataset: Any, max_rows: int = MAX_ROWS) -> dict[int, int]:
    """Return the lengths of all rows, or of those that are looked at, by index.

    Args:
        dataset: it can be asked for single rows.
        max_rows: how many rows to fetch if no column tells their lengths.
    """
    num_rows = len(dataset)
    if hasattr(dataset, "with_format") and hasattr(dataset, "column_names"):  # of `datasets`
        if "length" in dataset.column_names:
            return dict(enumerate(dataset["length"]))
        if names := [name for name in dataset.column_names if _holds_tokens(name)]:
            return _counted(dataset.select_columns(names).with_format("arrow"), num_rows)
    return {index: _length(dataset[index]) for index in _spread(num_rows, max_rows)}


def _counted(table: Any, num_rows: int) -> dict[int, int]:
    lengths: dict[int, int] = {}
    num_slices = max(1, _MAX_COUNTED // _SLICE)
    for start in _spread(-(-num_rows // _SLICE), num_slices):
        rows = table[start * _SLICE : (start + 1) * _SLICE]
        columns = [
            [n for chunk in c.chunks for n in chunk.value_lengths().to_pylist()]
            for c in rows.columns
        ]
        totals = (sum(num or 0 for num in numbers) for numbers in zip(*columns, strict=True))
        lengths |= {start * _SLICE + row: total for row, total in enumerate(totals)}
    return lengths


def _spread(num: int, most: int) -> Iterable[int]:
    return range(0, num, max(1, -(-num // most)))


def _length(row: object) -> int:
    if not isinstance(row, Mapping):
        return 0
    return sum(
        len(value)
        for name, value in row.items()
        if _holds_tokens(name) and hasattr(value, "__len__")
    )


def _holds_tokens(name: str) -> bool:
    """Tell whether a column holds tokens: `input_ids`, TRL's `prompt_ids`, `chosen_ids`, ..."""
    return name.endswith("_ids") and not name.endswith(("position_ids", "token_type_ids"))
