"""ReleaseEarlierRuns: gives the next trial, and the cell after a failed one, an empty GPU."""

import gc
import logging
import sys
from traceback import walk_stack
from weakref import WeakSet

from transformers import Trainer

from trainer_plugins.callbacks._run import (
    Event,
    Method,
    RunCallback,
    callback_of,
    calling_trainer,
    wrap_once,
)
from trainer_plugins.hf_trainer import HfArguments, HfState, HfTrainer
from trainer_plugins.upkeep.stack import code_of

logger = logging.getLogger(__name__)

# Trainers of this process that have begun training with this callback.
_known: "WeakSet[HfTrainer]" = WeakSet()


class ReleaseEarlierRuns(RunCallback):
    """Frees memory that an earlier run of this process still holds, as `released` does.

    It acts when a Trainer is about to move a model to its GPU: after a training in this process has
    failed, and between the trials of `hyperparameter_search`, even if the last one ran out of
    memory. It also collects garbage. It logs the bytes freed at INFO, with the holders of the rest.

    It does not touch a Trainer that has finished and that you still hold: use `released(trainer)`.

    Cost: a garbage collection (0.1 to 0.3 s) whenever a Trainer moves a model to its GPU. The first
    of these callbacks in a process wraps one method of `transformers.Trainer`.
    """

    def __init__(self) -> None:
        super().__init__()
        # The Trainer has no event before it moves its model.
        wrap_once("_move_model_to_device", ReleaseEarlierRuns, _release_before)

    def run_begins(self, args: HfArguments, state: HfState, event: Event) -> None:
        if (trainer := calling_trainer()) is not None:
            _known.add(trainer)


def _release_before(move: Method, mover: HfTrainer, *args: object, **kwargs: object) -> object:
    for trainer in list(_known):
        is_next_trial = trainer is mover and mover.model_init is not None
        has_failed = trainer.is_in_train and not _is_training(trainer)
        callback = callback_of(trainer, ReleaseEarlierRuns)
        if callback is not None and (is_next_trial or has_failed):
            with callback.harmless():
                from trainer_plugins.upkeep.released import released  # slow to import

                what = released(trainer)
                logger.info("an earlier run of this process still held memory: %s", what)
    gc.collect()
    return move(mover, *args, **kwargs)


def _is_training(trainer: HfTrainer) -> bool:
    code = code_of(Trainer.train)
    return any(
        frame.f_code is code and frame.f_locals["self"] is trainer
        for innermost in sys._current_frames().values()
        for frame, _ in walk_stack(innermost)
    )
