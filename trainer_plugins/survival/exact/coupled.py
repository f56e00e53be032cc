"""Coupled losses: corrections that make the losses of parts add up, using the whole micro-batch."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from trainer_plugins.patched import Patches
from trainer_plugins.survival.exact.shares import IGNORED, Inputs

ROW = "survival_row"  # name of the row numbers among the inputs of a coupled loss

Compute = Callable[[Inputs], torch.Tensor]


class Divided(NamedTuple):
    """Inputs, and the parts of them to compute next."""

    inputs: Inputs
    parts: tuple[Inputs, ...]


@dataclass(frozen=True)
class TwoMeans:
    """A loss that adds a mean over tokens to a mean over rows, such as ORPO's."""

    # We scale the mean over tokens by the part's tokens per row, divided by the whole's. The whole
    # loss is then a mean over rows, and so is the metric that trainers log for it.

    num_tokens: Callable[[Inputs], torch.Tensor]
    num_rows: Callable[[Inputs], int]
    # Scales the mean over tokens while a loss is computed.
    scale: Callable[[float], AbstractContextManager[object]]

    def loss(self, compute: Compute, part: Inputs, whole: Divided) -> torch.Tensor:
        """Compute the loss of a part; `compute` returns the loss of inputs on their own."""
        of_whole = self._count_per_row(whole.inputs)
        with self.scale(self._count_per_row(part) / of_whole if of_whole else 1.0):
            return compute(part)

    def _count_per_row(self, inputs: Inputs) -> float:
        return float(self.num_tokens(inputs)) / self.num_rows(inputs)


def cpo(trainer: Any) -> TwoMeans:
    """Describe CPO's loss, whose mean covers the tokens of chosen answers."""
    first = 0 if trainer.is_encoder_decoder else 1
    return TwoMeans(
        lambda inputs: (inputs["chosen_labels"][:, first:] != IGNORED).sum(),
        lambda inputs: len(inputs["chosen_labels"]),
        partial(_scale_output, trainer),
    )


def orpo(trainer: Any) -> TwoMeans:
    """Describe ORPO's loss, whose mean also covers the tokens of the prompt."""
    loss, mask = cpo(trainer), "chosen_attention_mask"
    if trainer.is_encoder_decoder:
        return loss
    return replace(loss, num_tokens=lambda inputs: (inputs[mask][:, 1:] == 1).sum())


def dpo_with_sft(trainer: Any) -> TwoMeans:
    """Describe DPO's loss if it includes "sft": a mean over the tokens of chosen answers."""

    def scale(factor: float) -> Patches:
        patches = Patches()
        weights = zip(trainer.loss_types, trainer.loss_weights, strict=True)
        scaled = [weight * factor if kind == "sft" else weight for kind, weight in weights]
        patches.set(trainer, "loss_weights", scaled)
        return patches

    return TwoMeans(
        lambda inputs: inputs["completion_mask"].chunk(2)[0][:, 1:].sum(),
        lambda inputs: len(inputs["completion_mask"]) // 2,
        scale,
    )


_TERM = 4  # index of the mean over tokens in the result of ORPO's and CPO's `concatenated_forward`


def _scale_output(trainer: Any, factor: float) -> Patches:
    patches, forward = Patches(), trainer.concatenated_forward

    def call_scaled(*args: Any, **options: Any) -> Any:
        changed = [*forward(*args, **options)]
        mean = changed[_TERM]  # of no token it is 0 / 0
        changed[_TERM] = mean * factor if factor else torch.zeros_like(mean)
        return changed

    patches.set(trainer, "concatenated_forward", call_scaled)
    return patches
