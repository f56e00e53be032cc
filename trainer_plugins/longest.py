"""Find the rows of a data set that will need the most memory, without computing."""

import copy
import importlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

_PROMPT = "prompt_ids"
_ANSWERS = (
    "completion_ids", "chosen_ids", "rejected_ids", "reference_ids", "chosen_input_ids",
    "rejected_input_ids",
)  # fmt: skip
_ANSWER_WITH_PROMPT = "chosen_labels"  # TRL's ORPO and CPO start each answer with its prompt
_OTHER_INPUTS = ("labels", "input_values", "input_features", "pixel_values")
_LENGTH = "length"  # a column of lengths, if none holds tokens
_DECODES = "decode_example"  # a method of features that are files: images, audio, video
_Numbers: TypeAlias = NDArray[np.int64]


class LongestRows:
    """Collates the longest rows of a data set as its loader would, and consumes none of them."""

    def __init__(self, dataset: Any, collate: Any, num: int, model: nn.Module) -> None:
        self._dataset = dataset
        self._rows = longest_rows(dataset, num) if collate is not None else []
        # It may hold a generator, and a model, which we do not copy.
        self._collate = copy.deepcopy(collate, {id(module): module for module in model.modules()})

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, num: int) -> Any:
        """Collate the longest rows; the short row, which gets padding, comes last."""
        return self._collate([self._dataset[index] for index in self._rows[:num]])


class Lengths(NamedTuple):
    """Holds the lengths of a data set's rows, as far as they were read."""

    rows: _Numbers  # the indices of these rows
    columns: Mapping[str, _Numbers]  # of tokens, or of the numbers in an image or audio
    num_rows: int  # the rows of the data set, read or not

    @property
    def tokens(self) -> _Numbers:
        """Return the tokens of each row; of preference data, the prompt and the longer answer."""
        answers = [each for name, each in self.columns.items() if name in _ANSWERS]
        if not answers:
            return self._sum(name for name in self.columns if _holds_tokens(name))
        longer: _Numbers = np.max(answers, axis=0)
        return longer if _ANSWER_WITH_PROMPT in self.columns else longer + self._sum([_PROMPT])

    @property
    def sizes(self) -> _Numbers:
        """Return the sort key of rows: tokens and labels, or the numbers of images and audio."""
        has_answers = any(name in _ANSWERS for name in self.columns)
        return self.tokens if has_answers else self._sum(self.columns)

    def longest(self, num: int) -> list[int]:
        """Return the indices of the longest rows, the longest first; there may be fewer."""
        order = np.argsort(-self.sizes, kind="stable")[:num]
        return [int(index) for index in self.rows[order]]

    def longest_with_padding(self, num: int) -> list[int]:
        """Return the longest rows, followed by the shortest.

        The shortest adds padding to the batch, as most batches have: models take a cheaper path
        without padding, so rehearsing that would be too optimistic.
        """
        order = self.longest(max(1, num))
        if num > 1:
            order[min(num, len(order)) - 1 :] = [int(self.rows[np.argmin(self.sizes)])]
        return order

    @property
    def are_inputs(self) -> bool:
        """Return whether a model's inputs were measured, not raw text, images or single labels."""
        there = any(name == _LENGTH or _is_input(name) for name in self.columns)
        return there and int(self.sizes.max(initial=0)) > 1

    def _sum(self, names: Iterable[str]) -> _Numbers:
        none = np.zeros(len(self.rows), np.int64)
        return sum((self.columns[name] for name in names if name in self.columns), none)


def has_rows(dataset: object) -> bool:
    """Return whether a data set gives single rows, without consuming any."""
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def longest_rows(dataset: Any, num: int) -> list[int]:
    """Return the indices of the longest rows, followed by that of the shortest."""
    if not has_rows(dataset) or len(dataset) == 0:
        return []
    return lengths_of(dataset).longest_with_padding(num)


def lengths_of(dataset: Any, seconds: float = 10.0) -> Lengths:
    """Return the lengths of the rows of a data set for which `has_rows` holds.

    Without a transform they are in Arrow's offsets (a million rows of 500 tokens take 0.1 s). Other
    rows are fetched for this many `seconds`, in an order that is evenly spread wherever it ends.
    """
    arrow = sys.modules.get("datasets")
    is_table = arrow is not None and isinstance(dataset, arrow.Dataset)
    if is_table and dataset.format["type"] != "custom":
        decoded = {name for name, kind in dataset.features.items() if hasattr(kind, _DECODES)}
        names = _choose_counted([name for name in dataset.column_names if name not in decoded])
        if names:
            return _measure_columns(dataset, names)
    return _measure_rows(dataset, seconds)


def lengths_as_collated(dataset: Any, collate: Callable[[list[Any]], Any]) -> tuple[Lengths, str]:
    """Return the lengths of rows, as the collator makes them if they are text or images.

    The second value says why they are the lengths of the raw rows instead; else it is empty.
    """
    lengths, why = lengths_of(dataset), ""
    if not lengths.are_inputs:
        try:
            collated = lengths_of(_Collated(dataset, collate))
            lengths = collated if collated.are_inputs else lengths
        except Exception as error:  # noqa: BLE001 - the user's own, which may need several rows
            words = " ".join(f"{type(error).__name__}: {error}".split())
            why = f"the rows hold no inputs, and the collator failed on a single one: {words}"
    return lengths, why


class _Collated:
    """Gives each row as a batch of its own."""

    def __init__(self, rows: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._rows, self._collate = rows, collate

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._collate([self._rows[index]])


def _measure_columns(dataset: Any, names: list[str]) -> Lengths:
    columns: dict[str, _Numbers] = {}
    for name in names:
        chunks = dataset.data.column(name).chunks
        if name == _LENGTH:
            numbers = [chunk.to_numpy(False).astype(np.int64) for chunk in chunks]
        else:
            numbers = [_num(chunk) for chunk in chunks]
        columns[name] = np.concatenate([np.zeros(0, np.int64), *numbers])
    if dataset._indices is not None:  # a shuffle or a selection, which copies no rows
        drawn = dataset._indices.column(0).to_numpy()
        columns = {name: numbers[drawn] for name, numbers in columns.items()}
    return Lengths(np.arange(len(dataset)), columns, len(dataset))


def _num(column: Any) -> _Numbers:
    """Count the numbers and characters in each value of an Arrow array, however it is nested."""
    types: Any = importlib.import_module("pyarrow.types")
    compute: Any = importlib.import_module("pyarrow.compute")
    column = getattr(column, "storage", column)  # of an extension type, such as `Array2D`
    kind, num = column.type, len(column)
    is_text = types.is_string(kind) or types.is_large_string(kind)
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if types.is_struct(kind):
        fields = [_num(column.field(at)) for at in range(kind.num_fields)]
        return np.asarray(np.sum(fields, axis=0), np.int64)
    if is_text or (is_list and types.is_primitive(kind.value_type)):
        lengths = (compute.binary_length if is_text else compute.list_value_length)(column)
        return np.asarray(lengths.fill_null(0), np.int64)
    if is_list:
        rows = compute.list_parent_indices(column).to_numpy()
        inner = _num(compute.list_flatten(column))
        return np.bincount(rows, inner, minlength=num).astype(np.int64)
    return np.ones(num, np.int64)


def _measure_rows(dataset: Any, seconds: float) -> Lengths:
    until, looked, found = time.monotonic() + seconds, [], []
    for index in _spread(len(dataset)):
        row = dataset[index]
        looked.append(index)
        # a dict, or a similar object such as a `BatchEncoding`
        has_names = isinstance(row, Mapping) or hasattr(row, "keys")
        names = _choose_counted([*row]) if has_names else []
        found.append({name: _size(row[name]) for name in names})
        if time.monotonic() > until:
            break
    rows = np.array(looked, np.int64)
    order = np.argsort(rows)
    columns = {
        name: np.array([lengths.get(name, 0) for lengths in found], np.int64)[order]
        for name in {name: None for lengths in found for name in lengths}
    }
    return Lengths(rows[order], columns, len(dataset))


def _spread(num: int) -> Iterator[int]:
    """Return all indices in an order whose prefixes are evenly spread: by the golden ratio."""
    step = max(1, round(num * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, num) > 1:
        step += 1
    return (index * step % num for index in range(num))


def _size(value: object) -> int:
    """Count the numbers of a value, or the characters of a text; a single number counts 0."""
    if isinstance(value, Tensor | np.ndarray):
        return math.prod(value.shape) if value.ndim else 0
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    if isinstance(value, Sequence) and value:
        first = value[0]
        if isinstance(first, Sequence | Mapping) or getattr(first, "ndim", 0) > 0:
            return sum(map(_size, value))
    return len(value) if isinstance(value, Sized) else 0


def _choose_counted(names: list[str]) -> list[str]:
    """Return the columns that count: known inputs of models; if there are none, all."""
    return [name for name in names if _is_input(name)] or names


def _is_input(name: str) -> bool:
    return _holds_tokens(name) or name in (*_OTHER_INPUTS, _ANSWER_WITH_PROMPT)


def _holds_tokens(name: str) -> bool:
    """Return whether a column holds tokens: `input_ids`, TRL's `prompt_ids`, `chosen_ids`, ..."""
    return name.endswith("_ids") and not name.endswith(("position_ids", "token_type_ids"))
