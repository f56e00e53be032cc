"""Micro-batch: one on its way from `compute_loss` to the end of `backward`, and its pieces."""

from dataclasses import dataclass, field

import torch
from torch import nn

from trainer_plugins.survival.attempt.marks import GradientMark
from trainer_plugins.survival.attempt.restore_point import RestorePoint
from trainer_plugins.survival.exact.handed import Handed
from trainer_plugins.survival.exact.layouts import Inputs, Layout
from trainer_plugins.survival.exact.shares import Weight
from trainer_plugins.survival.limit.limit import cells


@dataclass(frozen=True, slots=True)
class Start:
    """Holds the moment before an attempt: generators, metrics, gradients and allocated memory."""

    snapshot: RestorePoint
    mark: GradientMark
    allocated_bytes: int


@dataclass(slots=True)
class Piece:
    """Holds some examples of a micro-batch, or all."""

    inputs: Inputs
    num: int
    """How many examples it has; 1 if they cannot be told apart."""

    factor: float = 1.0
    """What its loss is multiplied by in the loss of the micro-batch."""

    share: float = 1.0
    """How much of the micro-batch it is, for the metrics."""

    final: set[nn.Parameter] = field(default_factory=set)
    """The parameters that have received these examples' gradient."""

    @property
    def num_cells(self) -> int:
        return cells(self.inputs)

    def parts(
        self, layout: Layout, sizes: list[int], weight: Weight, share: Weight
    ) -> list["Piece"]:
        """Divide it into parts of these sizes.

        A part that weighs nothing is left out if its mean is not a number.
        """
        whole, whole_share = weight.of(self.inputs, self.num), share.of(self.inputs, self.num)
        parts, start = [], 0
        for num in sizes:
            inputs = layout.take(self.inputs, start, start + num)
            factor = self.factor * weight.share(weight.of(inputs, num), whole)
            if factor or weight.is_finite:
                part_share = self.share * share.share(share.of(inputs, num), whole_share)
                parts.append(Piece(inputs, num, factor, part_share, set(self.final)))
            start += num
        return parts


@dataclass(slots=True)
class MicroBatch:
    """Holds one call of `compute_loss` in training, and the `backward` that follows it."""

    whole: Piece
    num_items: torch.Tensor | int | None
    scale: float
    """What the Trainer multiplies the loss by between the two."""

    start: Start
    handed: Handed | None = None
    """The loss as the caller got it."""

    is_finished: bool = False
    """Whether its backward has been done, in pieces."""
