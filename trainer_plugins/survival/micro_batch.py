"""A micro-batch on its way from `compute_loss` to the end of `backward`, and the pieces it is divided into."""

from dataclasses import dataclass, field

import torch
from torch import nn

from trainer_plugins.survival.attempt.marks import GradientMark
from trainer_plugins.survival.attempt.snapshot import Snapshot
from trainer_plugins.survival.exact.handed import Handed
from trainer_plugins.survival.exact.layouts import Inputs, Layout
from trainer_plugins.survival.exact.shares import Weight
from trainer_plugins.survival.limit.limit import cells


@dataclass(frozen=True, slots=True)
class Start:
    """The moment before an attempt: generators and metrics, gradients, and what is alive on the card."""

    snapshot: Snapshot
    mark: GradientMark
    allocated_bytes: int


@dataclass(slots=True)
class Piece:
    """Some examples of a micro-batch, or all."""

    inputs: Inputs
    num: int
    """How many; 1 where they cannot be told apart."""

    factor: float = 1.0
    """Of its loss in that of the micro-batch."""

    share: float = 1.0
    """Of the micro-batch, for the metrics."""

    final: set[nn.Parameter] = field(default_factory=set)
    """The parameters that have received these examples' gradient."""

    @property
    def num_cells(self) -> int:
        return cells(self.inputs)

    def parts(
        self, layout: Layout, sizes: list[int], weight: Weight, share: Weight
    ) -> list["Piece"]:
        """Divide it. What weighs nothing is left out where its mean is not a number."""
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
    """One call of `compute_loss` in training, and the `backward` that follows it."""

    whole: Piece
    num_items: torch.Tensor | int | None
    scale: float
    """By which the Trainer multiplies the loss between the two."""

    start: Start
    handed: Handed | None = None
    """The loss as the caller got it."""

    is_finished: bool = False
    """Whether its backward has been done, in pieces."""
