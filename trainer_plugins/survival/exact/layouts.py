"""Layouts: finds how examples are arranged in a micro-batch, and extracts some of them."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import pad

from trainer_plugins.survival.exact.shares import (
    ANSWERS,
    IGNORED,
    PROBE_TOKENS,
    TEXT,
    Batch,
    IndivisibleError,
    Inputs,
    cut_short,
    width_of,
)

# Name endings of tensors that all rows may share, with a first dimension of 1.
_SHARED = ("position_ids", "attention_mask", "token_type_ids")

_CUMULATIVE = ("cu_seq_lens_q", "cu_seq_lens_k")
_LONGEST = ("max_length_q", "max_length_k")


@dataclass(frozen=True)
class Rows:
    """The layout in which every tensor has one row per example."""

    boundary: int | None = None  # the model's `rope_boundary`
    unit = "rows"  # unit to count, in the plural
    per_example = 1

    def count(self, inputs: Inputs) -> int:
        """Count the examples; 0 if the micro-batch has another layout."""
        num_rows = _num_rows(inputs)
        # Without position ids, positions extend to the padded length of all rows.
        positions = inputs.get("position_ids")
        if self.boundary is not None and torch.is_tensor(positions) and positions.dim() == 2:
            _check_one_side((positions.amax(1) + 1).tolist(), self.boundary)
        lengths = (num_rows, num_rows // self.per_example)
        for name, value in inputs.items():
            length = _length(value)
            if name == "position_ids" and _dims(value) > 2:
                raise IndivisibleError(
                    "`position_ids` has a plane for each kind of position, so it has no rows to cut"
                )
            if length is not None and length not in lengths and not _is_shared(name, value):
                raise IndivisibleError(
                    f"`{name}` has {length} rows where the others have {num_rows}"
                )
        return num_rows // self.per_example

    def take(self, inputs: Inputs, start: int, stop: int) -> Batch:
        return self._choose(inputs, lambda rows: rows[start:stop])

    def pick(self, inputs: Inputs, examples: list[int]) -> Batch:
        def choose(rows: Any) -> Any:
            return rows[examples] if torch.is_tensor(rows) else [rows[one] for one in examples]

        return self._choose(inputs, choose)

    def _choose(self, inputs: Inputs, choose: Callable[[Any], Any]) -> Batch:
        num_rows = _num_rows(inputs)
        return {
            name: value
            if _length(value) is None or _is_shared(name, value)
            else self._choose_of(value, num_rows, choose)
            for name, value in inputs.items()
        }

    def _choose_of(self, value: Any, num_rows: int, choose: Callable[[Any], Any]) -> Any:
        return choose(value)

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts)

    def probe(self, inputs: Inputs, num: int) -> Batch:
        """Take the first few examples, cut short, and labelled so that all weights differ."""
        few = self.take(inputs, 0, num)
        labels: Any = few.get("labels")
        is_one_a_row = torch.is_tensor(labels) and labels.dim() == 1
        is_class = is_one_a_row and not labels.is_floating_point()
        if num > 2 and is_class and bool((inputs["labels"] == IGNORED).any()):
            # One of them does not count. Without such a label a loss may not know it.
            few["labels"] = torch.cat([labels[:-1].clamp(min=0), labels.new_full((1,), IGNORED)])
        texts = {n: value for n, value in few.items() if n.endswith(TEXT) and _is_text(value)}
        # The columns of a four-dimensional mask, or of three-dimensional features, are unknown.
        if all(_dims(value) < 2 for name, value in few.items() if name not in texts):
            few.update(cut_short(texts, num))
        return _move_answers(few, num)


class Pairs(Rows):
    """TRL's layout of pairs: all chosen rows, then all rejected; some tensors have half."""

    unit = "pairs"
    per_example = 2

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[which] for which in (0, 1) for half in halves])

    def _choose_of(self, value: Any, num_rows: int, choose: Callable[[Any], Any]) -> Any:
        if len(value) != num_rows:
            return choose(value)
        chosen, rejected = choose(value[: num_rows // 2]), choose(value[num_rows // 2 :])
        return torch.cat([chosen, rejected]) if torch.is_tensor(value) else [*chosen, *rejected]


class Completions(Rows):
    """TRL's layout of generated rows: a prompt, padded on the left, and its completion."""

    unit = "completions"

    def count(self, inputs: Inputs) -> int:
        return super().count(inputs) if "completion_ids" in inputs else 0

    def longest(self, inputs: Inputs, num_tokens: int | None) -> Batch:
        """Return the rows as if each completion had `num_tokens` tokens, the allowed maximum."""
        missing = (num_tokens or 0) - inputs["completion_ids"].size(1)
        long = self._cut_texts(inputs, None, lambda text: pad(text, (0, max(0, missing))))
        long["completion_mask"] = torch.ones_like(long["completion_mask"])
        return long

    def shorten(self, inputs: Inputs, part: float) -> Batch:
        """Return the rows with this fraction of their tokens, on both sides of the prompt's end."""
        num_prompt = math.ceil(part * inputs["prompt_ids"].size(1))
        num = math.ceil(part * inputs["completion_ids"].size(1))
        return self._cut_texts(inputs, num_prompt, lambda text: text[:, :num])

    def probe(self, inputs: Inputs, num: int) -> Batch:
        few = self.take(inputs, 0, num)
        few = self._cut_texts(few, PROBE_TOKENS, lambda text: text[:, :PROBE_TOKENS])
        few["completion_mask"] = torch.ones_like(few["completion_mask"])
        few["completion_mask"][0, PROBE_TOKENS // 3 :] = 0
        # If a group's rewards are equal, all are 0, and there would be no gradient to measure.
        few["advantages"] = torch.ones_like(few["advantages"])
        return few

    def _cut_texts(
        self, inputs: Inputs, num_prompt: int | None, cut: Callable[[torch.Tensor], torch.Tensor]
    ) -> Batch:
        """Keep the last tokens of the prompts, and cut everything as wide as the completions."""
        texts, width = dict(inputs), inputs["completion_ids"].size(1)
        for name, value in inputs.items():
            if name.startswith("prompt_"):
                texts[name] = value[:, -num_prompt:] if num_prompt else value
            elif _dims(value) == 2 and value.size(1) == width:
                texts[name] = cut(value)
        return texts


@dataclass(frozen=True)
class Packed:
    """Several sequences packed into one row; each begins where `position_ids` is 0."""

    boundary: int | None = None
    unit = "sequences"

    def count(self, inputs: Inputs) -> int:
        positions = inputs.get("position_ids")
        is_one_row = torch.is_tensor(positions) and positions.dim() == 2 and len(positions) == 1
        if not is_one_row or _num_rows(inputs) != 1:
            return 0
        spans = self._spans(inputs)
        if len(spans) < 2 or spans[0][0] != 0:
            return 0
        width = inputs["position_ids"].size(1)
        if self.boundary is not None:
            _check_one_side([end - begin for begin, end in spans], self.boundary)
        for name, value in inputs.items():
            if name in (*_CUMULATIVE, *_LONGEST) or _dims(value) < 2:
                continue
            if tuple(value.shape[:2]) != (1, width):
                raise IndivisibleError(
                    f"`{name}` has the shape {list(value.shape)} where the packed row has "
                    f"[1, {width}]"
                )
        return len(spans)

    def take(self, inputs: Inputs, start: int, stop: int) -> Batch:
        return self._select_spans(inputs, self._spans(inputs)[start:stop])

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts, dim=1)

    def probe(self, inputs: Inputs, num: int) -> Batch:
        spans = [
            (begin, min(end, begin + PROBE_TOKENS)) for begin, end in self._spans(inputs)[:num]
        ]
        begin, end = spans[0]
        spans[0] = (begin, min(end, begin + PROBE_TOKENS // 3))
        few = self._select_spans(inputs, spans)
        if "labels" in few:
            # If the first token of a sequence has a label, the loss looks across the border.
            few["labels"] = torch.where(
                few["position_ids"] == 0, few["labels"], few["labels"].clamp(min=0)
            )
        return few

    def _spans(self, inputs: Inputs) -> list[tuple[int, int]]:
        (positions,) = inputs["position_ids"]
        starts = (positions == 0).nonzero().flatten().tolist()
        return [*pairwise([*starts, len(positions)])]

    def _select_spans(self, inputs: Inputs, spans: list[tuple[int, int]]) -> Batch:
        lengths = torch.tensor([end - begin for begin, end in spans])
        columns = torch.cat([torch.arange(begin, end) for begin, end in spans])
        taken: Batch = {}
        for name, value in inputs.items():
            if name in _CUMULATIVE:
                ends = pad(lengths.cumsum(0), (1, 0))
                taken[name] = ends.to(value)
            elif name in _LONGEST:
                longest = lengths.max()
                taken[name] = longest.to(value) if torch.is_tensor(value) else int(longest)
            elif name == "seq_idx":
                numbers = torch.arange(len(spans)).repeat_interleave(lengths)[None]
                taken[name] = numbers.to(value)
            else:
                taken[name] = value[:, columns.to(value.device)] if _dims(value) >= 2 else value
        return taken


Layout = Rows | Packed  # an arrangement of examples in a micro-batch


def find_layout(layouts: Iterable[Layout], inputs: Inputs) -> Layout:
    """Return the first layout that fits a micro-batch. Raises IndivisibleError if none does."""
    for layout in layouts:
        if layout.count(inputs) > 0:
            return layout
    raise IndivisibleError("it holds no tensor with one row per example")


def _check_one_side(lengths: list[int], boundary: int) -> None:
    if min(lengths) <= boundary < max(lengths):
        raise IndivisibleError(
            f"one of its sequences has {max(lengths)} tokens, and longrope switches the whole "
            f"micro-batch to other frequencies above {boundary}: pieces without it would keep "
            "those for short ones"
        )


def _dims(value: object) -> int:
    return value.dim() if torch.is_tensor(value) else 0


def _is_text(value: object) -> bool:
    if not torch.is_tensor(value) or value.dim() != 2:
        return False
    return value.size(1) > 0 and not value.is_floating_point()


def _is_shared(name: str, value: object) -> bool:
    """Return whether all rows share a tensor, such as position ids of the shape [1, tokens]."""
    return name.endswith(_SHARED) and _dims(value) >= 2 and _length(value) == 1


def _move_answers(few: Batch, num: int) -> Batch:
    """Move answers into shortened rows; of three or more, the last lies outside, uncounted."""
    for name in (name for name in ANSWERS if torch.is_tensor(few.get(name))):
        width = width_of(few)
        few[name] = few[name].clamp(max=width - 1)
        if num > 2:
            few[name][-1] = width
    return few


def _length(value: object) -> int | None:
    """Return the number of rows of a value; None for a flag or a number, which rows share."""
    if torch.is_tensor(value):
        return len(value) if value.dim() else None
    if value is None or isinstance(value, bool | int | float | str):
        return None
    if isinstance(value, list | tuple):
        return len(value)
    raise IndivisibleError(f"it holds a {type(value).__name__}, which cannot be divided by rows")


def _num_rows(inputs: Inputs) -> int:
    """Return the number of rows of the token ids, or of the first tensor that has rows."""
    for name, value in inputs.items():
        if name.endswith("input_ids"):
            return (_length(value) or 0) if torch.is_tensor(value) else 0
    for value in inputs.values():
        if torch.is_tensor(value) and value.dim():
            return len(value)
    return 0
