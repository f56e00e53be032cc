"""Passes: compute rows so that results can be compared; what a sample of rows has shown."""

import math
from collections.abc import Callable, Container
from dataclasses import dataclass

import torch
from torch import nn

from trainer_plugins.survival.attempt.state import State
from trainer_plugins.survival.certificate.held import Drawers
from trainer_plugins.survival.certificate.samples import Sample
from trainer_plugins.survival.exact.coupled import Divided
from trainer_plugins.survival.exact.finality import Watch
from trainer_plugins.survival.exact.shares import Inputs, Weight

Loss = Callable[[Inputs, Divided | None], torch.Tensor]  # of inputs, which may be a part


@dataclass(frozen=True, slots=True)
class Passes:
    """Computes passes that can be compared: each begins from the same state."""

    loss: Loss
    scale: float  # what training multiplies the loss by before its backward pass
    parameters: list[nn.Parameter]  # the parameters whose gradient is measured
    watch: Watch
    state: State
    drawers: Drawers
    put_back: Callable[[], object]  # restores random numbers and metrics

    def begin(self, *, goes_on: bool = False, notes: Container[str] = ()) -> None:
        """Begin a pass: with the state, or the `notes`, that the one before has left."""
        if not goes_on and not notes:
            self.put_back()
        if not goes_on:
            self.state.restore(notes)
        self.drawers.begin()


@dataclass(frozen=True, slots=True)
class Measurement:
    """Holds what a sample has shown."""

    sample: Sample
    errors: dict[Weight, float]  # by each weight tried, on the rank where parts are farthest
    tolerance: float
    how: str  # how it was measured: "in training mode"
    is_gradient: bool

    @property
    def words(self) -> str:
        return f"{self.sample.words}, {self.how}"

    def fits(self, weight: Weight) -> bool:
        return self.errors.get(weight, math.inf) <= self.tolerance
