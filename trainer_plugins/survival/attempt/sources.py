"""Sources: what a data set, a collator and a Trainer draw from and count with, to restore it."""

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.survival.attempt.holders import Roots
from trainer_plugins.survival.attempt.state import State


class Sources:
    """Keeps generators and plain attributes, found through attributes, closures and globals."""

    def __init__(self, *roots: object) -> None:
        self._state = State(Roots({str(place): one for place, one in enumerate(roots)}))
        # What cannot be restored, in words; empty if everything can.
        kinds = self._state.consumed()
        self.why_not = next(
            (f"rows come from {one}, which cannot be restored" for one in kinds), ""
        )

    def restore(self) -> None:
        self._state.restore_draws()
        self._state.restore()


def sources_of(trainer: HfTrainer) -> Sources:
    """Find what a Trainer and its training rows draw from and count with."""
    loader = trainer.callback_handler.train_dataloader
    rows = (getattr(loader, name, None) for name in ("dataset", "collate_fn"))
    return Sources(*rows, trainer)
