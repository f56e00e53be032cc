"""Alone: one process, which owes nobody anything. What the other kinds begin from."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import nn
from transformers import Trainer

from trainer_plugins.survival.attempt import DidNotFit, attempt

T = TypeVar("T")


class Alone:
    """Of one run.

    Args:
        trainer: whose run it is.
        model: as the Trainer calls it, in its wrapper.
    """

    def __init__(self, trainer: Trainer, model: nn.Module) -> None:
        self.trainer, self.model = trainer, model

    @property
    def bare(self) -> nn.Module:
        """The model without its wrapper: computing on it reaches no other rank."""
        return self.model

    def begin(self) -> None:
        """A micro-batch begins."""

    def attempt(self, work: Callable[[], T], release: Callable[[], object] | None = None) -> T | DidNotFit:
        """Run what may not fit, here or on a rank that has to stop with this one."""
        return attempt(work, release)

    def failed(self, phase: str, is_last: bool, changed: set[nn.Parameter]) -> str:
        """What was attempted did not fit.

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
        """The limit that holds for this rank, where it is this."""
        return limit
