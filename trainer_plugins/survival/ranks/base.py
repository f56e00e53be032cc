"""Base: what a kind of ranks does unless it says otherwise."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from torch import nn

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.survival.attempt.attempt import DidNotFit, attempt
from trainer_plugins.survival.micro_batch import MicroBatch
from trainer_plugins.survival.ranks.protocol import Window
from trainer_plugins.upkeep.roll_call import RollCall

T = TypeVar("T")


class Base:
    """Tries on this rank alone, owes nothing, and leaves the model as it is; see `Ranks`."""

    options: Mapping[str, object] = {}

    def __init__(self, trainer: HfTrainer, model: nn.Module) -> None:
        self.trainer, self.model = trainer, model

    @property
    def window(self) -> Window | None:
        return None

    @property
    def bare(self) -> nn.Module:
        return self.model

    def absent(self, roll_call: RollCall, *, is_met: bool) -> str:
        """Return nothing: no other rank has to take part."""
        return ""

    def prepare(self, tiny: Callable[[], object]) -> None:
        """Do nothing, unless a kind owes the others a tiny pass."""

    def begin(self, micro: MicroBatch) -> None:
        """Do nothing, unless a kind keeps a state of its own."""

    def end(self) -> None:
        """Do nothing, unless a kind has changed the model."""

    def kept(self, parameters: tuple[nn.Parameter, ...]) -> tuple[nn.Parameter, ...]:
        return parameters

    def attempt(
        self,
        work: Callable[[], T],
        release: Callable[[], object] | None = None,
        *,
        is_end: bool = True,
    ) -> T | DidNotFit:
        return attempt(work, release, self.trainer.args.device)

    def failed(self, phase: str, is_last: bool, changed: set[nn.Parameter]) -> str:
        return ""

    def part_failed(self, error: Exception) -> None:
        """Do nothing: no rank waits, or the vote that follows tells the others."""

    @contextmanager
    def piece(self, is_last: bool) -> Iterator[nn.Module]:
        yield self.model

    def finished(self) -> None:
        """Do nothing: no other rank waits, or each piece had all of its collectives."""

    def forget(self) -> None:
        """Do nothing, unless a measurement leaves gradients."""
