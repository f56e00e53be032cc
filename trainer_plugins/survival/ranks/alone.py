"""Alone: one process, which owes nobody anything. What the other kinds begin from."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import Trainer

from trainer_plugins.survival.attempt.attempt import DidNotFit, attempt
from trainer_plugins.survival.attempt.baseline import card_of
from trainer_plugins.survival.limit.limit import most
from trainer_plugins.survival.micro_batch import MicroBatch
from trainer_plugins.units import MIB

T = TypeVar("T")

_NO_LIMIT = 1 << 60
"""In a vote, the limit of a rank that has none."""

SLACK = 0.05
"""Of the card, left free by a limit that a rehearsal found: fragmentation differs from one micro-batch to the next."""


class Alone:
    """Of one run.

    Args:
        trainer: whose run it is.
        model: as the Trainer calls it, in its wrapper.
    """

    in_step = False
    """Whether every rank has to compute as many pieces of a micro-batch as the others."""

    window: list[MicroBatch] | None = None
    """The micro-batches of this optimizer step, where a failure means that all of them are computed again."""

    options: Mapping[str, Any] = {}
    """What the Trainer passes to `accelerator.backward` besides the loss."""

    def __init__(self, trainer: Trainer, model: nn.Module) -> None:
        self.trainer, self.model = trainer, model
        self.tiny: Callable[[], object] = list
        """Runs forward and backward over next to nothing of the micro-batch."""

    @property
    def bare(self) -> nn.Module:
        """The model without its wrapper: computing on it reaches no other rank."""
        return self.model

    def begin(self, micro: MicroBatch) -> None:
        """A micro-batch begins."""

    def end(self) -> None:
        """Put back what was changed on the model."""

    def attempt(
        self,
        work: Callable[[], T],
        release: Callable[[], object] | None = None,
        *,
        is_end: bool = True,
    ) -> T | DidNotFit:
        """Run what may not fit, here or on a rank that has to stop with this one.

        Args:
            work: what is tried.
            release: called after a failure, to let go of what frames above this one hold.
            is_end: whether a backward pass ends it; a forward pass alone is followed by its
                backward.
        """
        return attempt(work, release, self.trainer.args.device)

    def failed(self, phase: str, is_last: bool, changed: set[nn.Parameter]) -> str:
        """What was attempted did not fit.

        Returns why this run cannot go on from there; nothing where it can.

        Args:
            phase: the "forward" or the "backward" pass.
            is_last: whether no other piece of the micro-batch would have come after it.
            changed: the parameters that received their gradient before it failed.

        Returns:
            Why the micro-batch cannot be finished, where it cannot.
        """
        return ""

    @contextmanager
    def piece(self, is_last: bool) -> Iterator[nn.Module]:
        """What forward and backward of a piece run in, and on which model."""
        yield self.model

    def finished(self) -> None:
        """Every piece of a micro-batch is computed."""

    def agreed(self, limit: float) -> float:
        """The least limit of all ranks that have to compute in step, in whole cells: a fraction more may not fit."""
        if not self.in_step:
            return limit
        lowest = -self.highest(-_NO_LIMIT if math.isinf(limit) else -math.floor(limit))
        return math.inf if lowest == _NO_LIMIT else float(lowest)

    def highest(self, value: int) -> int:
        """The highest value of all ranks that have to compute in step with this one.

        All of them ask.
        """
        return value

    def gradient(
        self, loss: Callable[[], torch.Tensor], parameters: list[nn.Parameter]
    ) -> list[torch.Tensor] | DidNotFit:
        """The gradient of a loss, a tensor for each parameter, in float64 on the CPU.

        None is accumulated.
        """

        def work() -> list[torch.Tensor]:
            with torch.enable_grad():
                gradients = torch.autograd.grad(loss(), parameters, allow_unused=True)
            return [
                torch.zeros(1).double() if g is None else g.flatten().cpu().double()
                for g in gradients
            ]

        return attempt(work, device=self.trainer.args.device)

    def forget(self) -> None:
        """A measurement has computed gradients that nobody wants."""

    @contextmanager
    def apart(self) -> Iterator[nn.Module]:
        """What a rehearsal computes in, and on which model: it reaches no other rank, as each rehearses by itself."""
        yield self.bare

    def most(self, compute: Callable[[nn.Module, int], object], num: int, least: int) -> int:
        """How many examples fit at once, found by computing them, on top of all gradients.

        Those are dropped again.

        All of them may take the last byte, as without us, and so may the least; what is between
        leaves `SLACK`.

        Args:
            compute: forward and backward of so many, on a model.
            num: of how many.
            least: fewer are never computed at once.
        """
        missing = [p for p in self.bare.parameters() if p.requires_grad and p.grad is None]
        try:
            with self.apart() as model:
                if isinstance(attempt(partial(_add_gradients, missing)), DidNotFit):
                    return 0
                held = {num: 0, least: 0}

                def fits(size: int) -> bool:
                    work = partial(
                        self._compute_beside,
                        compute,
                        model,
                        size,
                        held.get(size, self._slack_bytes()),
                    )
                    return not isinstance(self.attempt(work), DidNotFit)

                return most(fits, num, least, (num,))
        finally:
            for parameter in missing:
                parameter.grad = None

    def _slack_bytes(self) -> int:
        """No less than a segment of torch's allocator."""
        card = card_of(self.trainer.args.device)
        reading = card.read() if card else None
        return max(2 * MIB, int(SLACK * reading.total_bytes)) if reading else 0

    def _compute_beside(
        self,
        compute: Callable[[nn.Module, int], object],
        model: nn.Module,
        size: int,
        held_bytes: int,
    ) -> None:
        """Compute it while so much of the card is taken."""
        held = torch.empty(held_bytes, dtype=torch.uint8, device=self.trainer.args.device)
        compute(model, size)
        del held


def _add_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
