"""Weights: factors for the losses of pieces, with which they add up to the loss of the whole.

A loss that is divided by a number fixed for the whole window (`num_items_in_batch`) adds up as it
is. A mean over tokens or rows adds up if each piece is weighted by its number of tokens or rows.
The measure of a whole is the sum of its pieces' measures, so a piece may be divided again and
again.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from trainer_plugins.survival.exact.layouts import ANSWERS, IndivisibleError, Inputs, width_of
from trainer_plugins.survival.exact.shown import IGNORED


@dataclass(frozen=True, slots=True)
class Weight:
    """Says how much of the whole a piece is."""

    name: str
    """What the loss is, as in "a mean over tokens"."""

    measure: Callable[[Inputs, int], float] | None
    """Measures inputs of so many examples; None if every piece counts in full."""

    is_finite: bool = False
    """Whether the loss of inputs whose measure is 0 is 0, and not 0 / 0."""

    def share(self, piece: float, whole: float) -> float:
        """Return the factor for the loss of a piece, from the measures of piece and whole."""
        return 1.0 if self.measure is None or whole == 0 else piece / whole

    def of(self, inputs: Inputs, num: int) -> float:
        """Measure inputs. It reads the device, so it is for micro-batches that are divided."""
        return 1.0 if self.measure is None else self.measure(inputs, num)


def _tokens(inputs: Inputs, _: int) -> float:
    return float(_is_counted(labels_of(inputs)).sum())


def _next_tokens(inputs: Inputs, _: int) -> float:
    return float(_is_counted(labels_of(inputs)[..., 1:]).sum())


def _tokens_in_sight(inputs: Inputs, _: int) -> float:
    """Count labels that the attention mask shows: some models leave out the others."""
    labels, mask = labels_of(inputs), inputs.get("attention_mask")
    is_counted = _is_counted(labels)
    if torch.is_tensor(mask) and mask.shape == labels.shape:
        is_counted &= (mask == 1).to(is_counted.device)
    return float(is_counted.sum())


def _attended_tokens(inputs: Inputs, _: int) -> float:
    """Count all tokens except padding; packed sequences have none."""
    mask = inputs.get("attention_mask")
    return float(mask.sum() if torch.is_tensor(mask) else inputs["input_ids"].numel())


def _completion_tokens(inputs: Inputs, _: int) -> float:
    mask = inputs["completion_mask"]
    return float((mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).sum())


def labels_of(inputs: Inputs) -> torch.Tensor:
    """Return the labels by which parts are weighed.

    Raises:
        IndivisibleError: there are none.
    """
    labels = inputs.get("labels")
    if not torch.is_tensor(labels):
        raise IndivisibleError("it has no `labels` by which to weigh its parts")
    return labels


def _is_counted(labels: torch.Tensor) -> torch.Tensor:
    """Mark the labels that a loss counts.

    In a regression every number is a target, even -100.0.
    """
    return (
        torch.ones_like(labels, dtype=torch.bool)
        if labels.is_floating_point()
        else labels != IGNORED
    )


def _labelled_rows(inputs: Inputs, _: int) -> float:
    """Count rows with a label: of classes, one a row, cross-entropy leaves out ignored ones."""
    labels = labels_of(inputs)
    return float(_is_counted(labels).sum() if labels.dim() == 1 else len(labels))


def _answered_rows(inputs: Inputs, _: int) -> float:
    """Count rows whose answer lies within their tokens (transformers, ForQuestionAnsweringLoss).

    Raises:
        IndivisibleError: one begins within and ends outside, so two means go over different rows.
    """
    if not all(torch.is_tensor(inputs.get(name)) for name in ANSWERS):
        raise IndivisibleError("it has no `start_positions` and `end_positions`")
    starts, ends = (inputs[name] < width_of(inputs) for name in ANSWERS)
    if not torch.equal(starts, ends):
        raise IndivisibleError("an answer begins within its row and ends outside, or otherwise")
    return float(starts.sum())


SUM = Weight("a sum over the window", None)
LABELLED_ROWS = Weight("a mean over labelled rows", _labelled_rows)
ROWS = Weight("a mean over rows", lambda _, num: float(num))
ANSWERED_ROWS = Weight("a mean over rows with an answer", _answered_rows)
NEXT_TOKENS = Weight("a mean over next tokens", _next_tokens)
TOKENS = Weight("a mean over tokens", _tokens)
TOKENS_IN_SIGHT = Weight("a mean over tokens that the attention mask shows", _tokens_in_sight)
ATTENDED_TOKENS = Weight("a mean over tokens, with a label or without", _attended_tokens)
COMPLETION_TOKENS = Weight("a mean over tokens of completions", _completion_tokens, is_finite=True)
