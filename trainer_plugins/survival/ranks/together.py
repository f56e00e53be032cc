"""Together: ranks that compute equally many pieces, because each piece has collectives."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

from torch import nn
from transformers import Trainer

from trainer_plugins.survival.attempt.attempt import DidNotFit, attempt
from trainer_plugins.survival.micro_batch import MicroBatch
from trainer_plugins.survival.ranks.protocol import Window
from trainer_plugins.upkeep.agreement import Agreement

T = TypeVar("T")

_NO_LIMIT = 1 << 60
"""Vote of a rank without a limit."""


class Together:
    """Handles ranks that vote before they divide, measure or rehearse; see `Ranks`."""

    forward_is_shared = True
    measures_together = True
    options: Mapping[str, object] = {}

    def __init__(self, trainer: Trainer, model: nn.Module) -> None:
        self.trainer, self.model = trainer, model
        self._votes = Agreement(trainer.args.ddp_timeout)

    @property
    def window(self) -> Window | None:
        return None

    @property
    def bare(self) -> nn.Module:
        return self.model

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
        """Do nothing: the vote that follows tells the others."""

    @contextmanager
    def piece(self, is_last: bool) -> Iterator[nn.Module]:
        yield self.model

    def finished(self) -> None:
        """Do nothing: each piece had all of its collectives."""

    def agreed(self, limit: float) -> float:
        """Return the least limit of all ranks, rounded down to whole cells.

        A fraction of a cell more was never seen to fit.
        """
        lowest = -self.highest(-_NO_LIMIT if math.isinf(limit) else -math.floor(limit))
        return math.inf if lowest == _NO_LIMIT else float(lowest)

    def highest(self, value: int) -> int:
        found = self._votes.highest(int(value))
        if found is None:
            raise RuntimeError(self._no_answer())
        return found

    def forget(self) -> None:
        """Do nothing, unless a measurement leaves gradients."""

    def rehearsing(
        self, harmless: AbstractContextManager[object]
    ) -> AbstractContextManager[object]:
        return nullcontext()

    def _no_answer(self) -> str:
        """Say why training stops when a vote could not be taken."""
        raise NotImplementedError
