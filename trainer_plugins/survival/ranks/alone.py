"""Alone: one process, which owes nobody anything. What the other kinds begin from."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import nn
from transformers import Trainer

from trainer_plugins.survival.attempt import DidNotFit, attempt
from trainer_plugins.survival.micro_batch import MicroBatch

T = TypeVar("T")


class Alone:
    """Of one run.

    Args:
        trainer: whose run it is.
        model: as the Trainer calls it, in its wrapper.
    """

    window: list[MicroBatch] | None = None
    """The micro-batches of this optimizer step, where a failure means that all of them are computed again."""

    def __init__(self, trainer: Trainer, model: nn.Module) -> None:
        self.trainer, self.model = trainer, model

    @property
    def bare(self) -> nn.Module:
        """The model without its wrapper: computing on it reaches no other rank."""
        return self.model

    def begin(self, micro: MicroBatch, tiny: Callable[[], object]) -> None:
        """A micro-batch begins; `tiny` runs forward and backward over next to nothing of it."""

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

    def failed(self, phase: str, is_last: bool) -> None:
        """What was attempted did not fit.

        Args:
            phase: the "forward" or the "backward" pass.
            is_last: whether no other piece of the micro-batch would have come after it.
        """

    @contextmanager
    def piece(self, is_last: bool) -> Iterator[nn.Module]:
        """What forward and backward of a piece run in, and on which model."""
        yield self.model

    def agreed(self, limit: float) -> float:
        """The limit that holds for this rank, where it is this."""
        return limit

    def most(self, here: int) -> int:
        """The largest of what the ranks bring that have to do the same as this one."""
        return here

    def end(self) -> None:
        """Put back what was changed on the model."""
