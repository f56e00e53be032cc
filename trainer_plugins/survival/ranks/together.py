"""Together: ranks that compute equally many pieces, because each piece has collectives."""

import math
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.survival.ranks.alone import Ranks
from trainer_plugins.upkeep.agreement import Agreement
from trainer_plugins.upkeep.roll_call import RollCall

_NO_LIMIT = 1 << 60  # vote of a rank without a limit

_WAIT_SECONDS, _WAIT_IF_MET_SECONDS = 10.0, 1.0  # less if they have met before


class Together(Ranks):
    """Handles ranks that vote before they divide, measure or rehearse."""

    forward_is_shared = True
    measures_together = True

    def __init__(self, trainer: HfTrainer, model: nn.Module) -> None:
        super().__init__(trainer, model)
        self._votes = Agreement(trainer.args.ddp_timeout)

    def absent(self, roll_call: RollCall, *, is_met: bool) -> str:
        missing = roll_call.missing(_WAIT_IF_MET_SECONDS if is_met else _WAIT_SECONDS)
        return f"{missing}; give every rank the same callbacks" if missing else ""

    def agreed(self, limit: float) -> float:
        """Return the least limit of all ranks, in whole cells: a fraction more never fitted."""
        lowest = self.lowest(_NO_LIMIT if math.isinf(limit) else math.floor(limit))
        return math.inf if lowest == _NO_LIMIT else float(lowest)

    def highest(self, value: int) -> int:
        found = self._votes.highest(value)
        if found is None:
            raise RuntimeError(self._no_answer())
        return found

    def rehearsing(
        self, harmless: AbstractContextManager[object]
    ) -> AbstractContextManager[object]:
        return nullcontext()

    def _no_answer(self) -> str:
        """Say why training stops when a vote could not be taken."""
        raise NotImplementedError
