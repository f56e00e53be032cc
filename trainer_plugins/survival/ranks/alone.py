"""Alone: one process, which owes nobody anything. What the other kinds begin from."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import Trainer

from trainer_plugins.survival.attempt import DidNotFit, attempt
from trainer_plugins.survival.limit import most
from trainer_plugins.survival.micro_batch import MicroBatch

T = TypeVar("T")


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
        self, work: Callable[[], T], release: Callable[[], object] | None = None, *, is_end: bool = True
    ) -> T | DidNotFit:
        """Run what may not fit, here or on a rank that has to stop with this one.

        Args:
            work: what is tried.
            release: called after a failure, to let go of what frames above this one hold.
            is_end: whether a backward pass ends it; a forward pass alone is followed by its backward.
        """
        return attempt(work, release, self.trainer.args.device)

    def failed(self, phase: str, is_last: bool) -> str | None:
        """What was attempted did not fit. Returns why this run cannot go on from there, if it cannot.

        Args:
            phase: the "forward" or the "backward" pass.
            is_last: whether no other piece of the micro-batch would have come after it.
        """
        return None

    @contextmanager
    def piece(self, is_last: bool) -> Iterator[nn.Module]:
        """What forward and backward of a piece run in, and on which model."""
        yield self.model

    def agreed(self, limit: float) -> float:
        """The limit that holds for this rank, where it is this."""
        return limit

    def highest(self, value: int) -> int:
        """The highest value of all ranks that have to compute in step with this one. All of them ask."""
        return value

    def forget(self) -> None:
        """A measurement has computed gradients that nobody wants."""

    @contextmanager
    def apart(self) -> Iterator[nn.Module]:
        """What a rehearsal computes in, and on which model: it reaches no other rank, as each rehearses by itself."""
        yield self.bare

    def most(self, compute: Callable[[nn.Module, int], object], num: int, least: int) -> int:
        """How many examples fit at once, found by computing them, on top of all gradients. Those are dropped again.

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
                return most(
                    lambda size: not isinstance(self.attempt(partial(compute, model, size)), DidNotFit),
                    *(num, least, (num,)),
                )
        finally:
            for parameter in missing:
                parameter.grad = None


def _add_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
