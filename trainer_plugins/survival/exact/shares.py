"""Shares: the weight of some examples in a micro-batch, and short examples that reveal it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

Inputs = Mapping[str, Any]  # a micro-batch from a data collator: mostly tensors

Batch = dict[str, Any]  # some examples of a micro-batch; may be modified

NumItems = torch.Tensor | int | None  # number of labels in the window, if counted

# The labels of question answering, one column each; beyond the last column none counts.
ANSWERS = ("start_positions", "end_positions")

IGNORED = -100  # the label that every loss of transformers ignores

PROBE_TOKENS = 16  # tokens per example in a probe: enough to show how a loss adds up

# Name endings of tensors with one column per token.
TEXT = (
    "input_ids", "attention_mask", "labels", "position_ids", "token_type_ids", "completion_mask",
)  # fmt: skip

_FEW = 3  # fewest tokens in a probe's partly labelled row

_Columns = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
_Texts = dict[str, torch.Tensor]  # two-dimensional integers, by a name with an ending of `TEXT`

T = TypeVar("T")


class IndivisibleError(ValueError):
    """Raised when a micro-batch cannot be divided exactly; the message says why."""


class Weight(NamedTuple):
    """A measure of how much of the whole a piece is."""

    name: str  # description of the loss, such as "a mean over tokens"
    # Measures inputs with this number of examples; None if every piece counts in full.
    measure: Callable[[Inputs, int], float] | None
    is_finite: bool = False  # the loss of inputs with measure 0 is 0, not 0 / 0

    def shares_of(self, whole: Inputs, num: int) -> Callable[[Inputs, int], float]:
        """Return a function that gives a part's share in the whole; both read the device."""
        measure = self.measure
        total = 0.0 if measure is None else measure(whole, num)
        if measure is None or total == 0:
            return lambda _, __: 1.0
        return lambda part, num_of_part: measure(part, num_of_part) / total


def labels_of(inputs: Inputs) -> torch.Tensor:
    """Return the labels that weigh the parts. Raises IndivisibleError if there are none."""
    labels = inputs.get("labels")
    if not torch.is_tensor(labels):
        raise IndivisibleError("it has no `labels`, so its parts cannot be weighted")
    return labels


def width_of(inputs: Inputs) -> int:
    """Return the number of columns of the token ids."""
    ids = next(value for name, value in inputs.items() if name.endswith("input_ids"))
    return int(ids.size(1))


def _is_counted(labels: torch.Tensor) -> torch.Tensor:
    """Mark the labels that a loss counts. In a regression every number is a target, even -100.0."""
    if labels.is_floating_point():
        return torch.ones_like(labels, dtype=torch.bool)
    return labels != IGNORED


def _num_counted(labels: torch.Tensor) -> float:
    return float(_is_counted(labels).sum())


def _tokens_in_sight(inputs: Inputs, _: int) -> float:
    """Count labels visible to the attention mask: some models skip the others."""
    labels, mask = labels_of(inputs), inputs.get("attention_mask")
    is_counted = _is_counted(labels)
    if torch.is_tensor(mask) and mask.shape == labels.shape:
        is_counted &= (mask == 1).to(is_counted.device)
    return float(is_counted.sum())


def _count_attended_tokens(inputs: Inputs, _: int) -> float:
    """Count all tokens except padding; packed sequences have none."""
    mask = inputs.get("attention_mask")
    return float(mask.sum() if torch.is_tensor(mask) else inputs["input_ids"].numel())


def _completion_tokens(inputs: Inputs, _: int) -> float:
    mask = inputs["completion_mask"]
    return float((mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).sum())


def _count_labelled_rows(inputs: Inputs, _: int) -> float:
    """Count rows with a label: with one class per row, cross-entropy skips ignored rows."""
    labels = labels_of(inputs)
    return _num_counted(labels) if labels.dim() == 1 else float(len(labels))


def _count_answered_rows(inputs: Inputs, _: int) -> float:
    """Count rows with an answer within their tokens (transformers, ForQuestionAnsweringLoss)."""
    if not all(torch.is_tensor(inputs.get(name)) for name in ANSWERS):
        raise IndivisibleError("it has no `start_positions` and `end_positions`")
    starts, ends = (inputs[name] < width_of(inputs) for name in ANSWERS)
    if not torch.equal(starts, ends):
        raise IndivisibleError("an answer has only one of its ends within its row")
    return float(starts.sum())


SUM = Weight("a sum over the window", None)
ALL_ROWS = Weight("a loss of all rows, of which a part has the gradient of its own", None)
LABELLED_ROWS = Weight("a mean over labelled rows", _count_labelled_rows)
ROWS = Weight("a mean over rows", lambda _, num: float(num))
ANSWERED_ROWS = Weight("a mean over rows with an answer", _count_answered_rows)
NEXT_TOKENS = Weight("a mean over next tokens", lambda x, _: _num_counted(labels_of(x)[..., 1:]))
TOKENS = Weight("a mean over tokens", lambda x, _: _num_counted(labels_of(x)))
TOKENS_IN_SIGHT = Weight("a mean over tokens that the attention mask shows", _tokens_in_sight)
ATTENDED_TOKENS = Weight("a mean over tokens, with a label or without", _count_attended_tokens)
COMPLETION_TOKENS = Weight("a mean over tokens of completions", _completion_tokens, is_finite=True)
WITHOUT_LABELS = (SUM, ROWS, ANSWERED_ROWS)  # these weights need no `labels`


def cut_short(texts: _Texts, num: int) -> _Texts:
    """Keep `PROBE_TOKENS` columns; of each `num` rows, label only part of the first (`_Shown`)."""
    masks = {
        (_part(name), v.size(1)): _Shown(_tokens_of(texts, name), v, num)
        for name, v in texts.items()
        if name.endswith("attention_mask")
    }
    of_width = {width: shown for (_, width), shown in masks.items()}
    cut: _Texts = {}
    for name, value in texts.items():
        width = value.size(1)
        shown = masks.get((_part(name), width)) or of_width.get(width)
        if shown is None:
            tokens = _tokens_of(texts, name)
            shown = of_width[width] = _Shown(tokens, torch.ones_like(tokens), num)
        text = shown.columns(value)
        if name.endswith("attention_mask"):
            text = shown.mask
        elif name.endswith("labels"):
            unlabelled = torch.where(shown.is_first, IGNORED, text)
            text = torch.where(shown.is_labelled, text.clamp(min=0), unlabelled)
        elif name.endswith("completion_mask"):
            text.fill_(1)
            text[::num, PROBE_TOKENS // 3 :] = 0
        cut[name] = text
    return cut


class _Shown:
    """The columns of padded rows that a probe keeps, with its mask and its labels."""

    # In the first row we label a third of the visible tokens, and the last token, which the mask
    # now hides from a loss that respects it.

    def __init__(self, tokens: torch.Tensor, mask: torch.Tensor, num: int) -> None:
        width = min(PROBE_TOKENS, mask.size(1))
        columns = _begins(tokens, mask, width)[:, None] + np.arange(width)
        self._kept = torch.from_numpy(columns).to(mask.device)
        self.mask = self.columns(mask)
        self.mask[(self.mask != 0).sum(1) < _FEW] = 1
        self.is_labelled = self.mask != 0
        self.is_first = torch.zeros_like(self.is_labelled)
        for row in range(0, len(self.mask), num):
            at = self.mask[row].nonzero().flatten()
            self.is_first[row] = True
            self.is_labelled[row, at[max(1, len(at) // 3) : -1]] = False
            if len(at) >= _FEW:
                self.mask[row, at[-1]] = 0

    def columns(self, value: torch.Tensor) -> torch.Tensor:
        return value.expand(len(self._kept), -1).gather(1, self._kept)


def _begins(tokens: torch.Tensor, mask: torch.Tensor, width: int) -> _Columns:
    """Find the start column of each row: the first token that differs from every other row."""
    # Chosen and rejected are equal up to the end of the prompt, and equal rows have no gradient. We
    # search in main memory: the card is full.
    is_shown = mask.cpu().numpy() != 0
    seen = np.where(is_shown, tokens.cpu().numpy(), -1)
    in_common = np.cumprod(seen[:, None] == seen, axis=2, dtype=np.int8).sum(2, dtype=np.int64)
    np.fill_diagonal(in_common, 0)
    begins, num_columns = in_common.max(1), seen.shape[1]
    first = is_shown.argmax(1)
    last = num_columns - 1 - is_shown[:, ::-1].argmax(1)
    begins = np.minimum(np.where(begins <= last, begins, first), last - _FEW + 1)
    found: _Columns = np.minimum(np.maximum(begins, first), num_columns - width)
    return found


def _tokens_of(texts: _Texts, name: str) -> torch.Tensor:
    """Return the tokens of a text: ids or labels of the same width, preferably its own."""

    def rank(other: str) -> tuple[bool, bool, bool]:
        is_own = _part(other) == _part(name)
        return not other.endswith(("input_ids", "labels")), not is_own, other.endswith("labels")

    return texts[min((n for n, v in texts.items() if v.size(1) == texts[name].size(1)), key=rank)]


def _part(name: str) -> str:
    """Return the prefix of a tensor's name: `prompt_`, `chosen_`; empty for `input_ids`."""
    return next(name.removesuffix(ending) for ending in TEXT if name.endswith(ending))


_WEIGHTED = ("aten::nll_loss_forward", "aten::nll_loss2d_forward")
_MEAN = 1  # number of the reduction "mean" (torch/nn/_reduction.py)


def compute_without_graph(compute: Callable[[], T]) -> T:
    """Compute a loss without its graph, unless it needs a gradient itself, as a penalty does."""
    try:
        with torch.no_grad():
            return compute()
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    with torch.enable_grad():
        return compute()


@dataclass(frozen=True)
class _ByClass:
    """Adds up the class weights of a part's labels."""

    of_classes: tuple[float, ...]
    ignored: int  # the label that does not count
    first: int = 0  # the first column of labels; 1 for next tokens

    def __call__(self, inputs: Inputs, _: int) -> float:
        labels = labels_of(inputs)[..., self.first :]
        of_classes = torch.tensor(self.of_classes, dtype=torch.float64)
        return float(of_classes[labels[labels != self.ignored].cpu()].sum())


def find_class_weights(compute: Callable[[], object]) -> tuple[Weight, ...]:
    """Find the class weights in the mean of a loss, if it calls torch's cross-entropy once."""
    with _Seen() as calls:
        compute_without_graph(compute)
    if len(calls.found) != 1:
        return ()
    name, (found,) = "a mean that is weighted by class", calls.found
    return Weight(name, found), Weight(f"{name}, over next tokens", replace(found, first=1))


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[_ByClass] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        if getattr(getattr(func, "_schema", None), "name", "") in _WEIGHTED:
            _, _, weight, reduction, ignored = args
            if weight is not None and reduction == _MEAN:
                self.found.append(_ByClass(tuple(weight.tolist()), ignored))
        return func(*args, **(kwargs or {}))
