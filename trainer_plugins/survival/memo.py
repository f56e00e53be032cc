"""SurvivalMemo: a run's limit and rungs, saved in checkpoints and reused at resume."""

import logging
import math
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers.trainer_callback import ExportableState

from trainer_plugins.callbacks._run import RunCallback, callback_of, move_before_trackers
from trainer_plugins.checkpointing import is_checkpointing
from trainer_plugins.hf_trainer import HfArguments, HfState, HfTrainer
from trainer_plugins.survival.attempt.attempt import CardReader, card_of
from trainer_plugins.survival.limit.ladder import climb
from trainer_plugins.survival.limit.limit import Pace
from trainer_plugins.survival.limit.optimizer_states import create_states
from trainer_plugins.survival.words import thrashing
from trainer_plugins.upkeep.agreement import RollCall

logger = logging.getLogger(__name__)


class SurvivalMemo(RunCallback, ExportableState):  # type: ignore[misc]
    """Keeps the limit, the active rungs, and the number of OOMs that the run survived."""

    def __init__(self) -> None:  # no arguments: transformers may recreate it at resume
        super().__init__()
        self.limit = math.inf  # cells (`limit.py`) at once; infinite until something fails
        self.is_rehearsed = False  # the limit was found on the longest rows
        self.rungs: list[str] = []
        self.num_survived = 0
        self.num_divided = 0  # micro-batches computed in pieces since training last logged
        self.learned_on: list[int] = []  # the card's bytes, and whether the user checkpoints
        self._num_logged = 0
        self._switched_on: list[str] = []  # rungs that we switched on in this process
        self.pace: Pace | None = None  # adapts this rank's own limit; None: all ranks share one
        self._card: CardReader | None = None
        self.is_in_step = False  # computations between steps are left alone
        self.roll_call = RollCall("survive_oom")  # answered at the first micro-batch

    def reset(self) -> None:
        super().reset()
        self.listener: Any = None  # the engine, notified when a step begins and training ends

    def state(self) -> dict[str, dict[str, object]]:
        names = ("is_rehearsed", "rungs", "num_survived", "learned_on")
        kept = {name: getattr(self, name) for name in names}
        # JSON has no infinity.
        return {
            "args": {},
            "attributes": kept if math.isinf(self.limit) else {**kept, "limit": self.limit},
        }

    def on_train_begin(self, args: HfArguments, state: HfState, *_: object, **event: Any) -> None:
        listener = self.listener
        self.begin_run()
        self.listener = listener
        self.roll_call.sign()
        move_before_trackers(self)
        self._card, self.is_in_step = None, False
        with self.harmless():
            self._recall(args, state, event["model"])
            if said := create_states(event["optimizer"]):
                logger.warning("%s", said)

    def on_step_begin(self, *_: object, **__: object) -> None:
        self.is_in_step = True
        if self.listener is not None:
            self.listener.step_begins()

    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        self.is_in_step = False

    def on_step_end(self, args: HfArguments, state: HfState, *_: object, **__: object) -> None:
        if self.pace is None:
            return
        with self.harmless():
            reading = self.card_for(args).read()
            num_retries = reading.num_alloc_retries if reading else 0
            self.limit, is_thrashing = self.pace.adapt(self.limit, num_retries)
            if is_thrashing:
                self.remark(args, state.global_step, thrashing(self.limit))

    def run_raises(self) -> None:
        super().run_raises()
        self.on_train_end()

    def on_train_end(self, *_: object, **__: object) -> None:
        if self.listener is not None:
            self.listener.training_ends()

    def on_log(
        self, _: object, state: HfState, *__: object, logs: dict[str, float], **___: object
    ) -> None:
        numbers: dict[str, float] = {}
        if self.num_survived > self._num_logged:
            self._num_logged = numbers["out_of_memory_survived"] = self.num_survived
        # Only training's own lines have both; other lines come back from train() or evaluate().
        if {"loss", "learning_rate"} <= logs.keys():
            if not math.isinf(self.limit) or self.num_divided:
                numbers["memory/divided_micro_batches"] = float(self.num_divided)
                self.num_divided = 0
            logs.update(numbers)
        if state.log_history:  # the Trainer already put a copy of `logs` there
            state.log_history[-1].update(numbers)

    def climb(self, ladder: Iterable[str], model: nn.Module) -> str:
        """Switch the next rung on and open the limit; return its name, empty if none is left."""
        rung = next((rung for rung in ladder if rung not in self.rungs and climb(rung, model)), "")
        if rung:
            self.rungs.append(rung)
            self._switched_on.append(rung)
            self.limit = math.inf  # limit and pace were learned without this rung
            if self.pace is not None:
                self.pace = Pace(has_failed=True, num_retries=self.pace.num_retries)
        return rung

    def card_for(self, args: HfArguments) -> CardReader:
        self._card = self._card or card_of(args.device)
        return self._card

    def _recall(self, args: HfArguments, state: HfState, model: nn.Module) -> None:
        # transformers restores callbacks only on request, and the limit is not a user's setting.
        name = type(self).__name__
        kept = state.stateful_callbacks.get(name, self.state())
        # A checkpoint of a run without us lacks the entry, and the next save would fail.
        state.stateful_callbacks[name] = kept
        for attribute, value in kept["attributes"].items():
            setattr(self, attribute, value)
        self._num_logged = self.num_survived
        reading = self.card_for(args).read()
        is_users_own = is_checkpointing(model) and not self.rungs
        learned_on = [reading.total_bytes if reading else 0, is_users_own]
        if learned_on != self.learned_on:
            self.limit, self.is_rehearsed, self.rungs = math.inf, False, []
            self.learned_on = learned_on
        # An active rung is the user's, unless an earlier run of this Trainer switched it on.
        self.rungs = [
            rung for rung in self.rungs if climb(rung, model) or rung in self._switched_on
        ]
        self._switched_on = [*self.rungs]


def memo_of(trainer: HfTrainer) -> SurvivalMemo:
    """Return the memo of a Trainer, adding one if it has none."""
    memo = callback_of(trainer, SurvivalMemo)
    if memo is None:
        memo = SurvivalMemo()
        trainer.callback_handler.add_callback(memo)  # a custom Trainer may refuse it
        # The Trainer sets this when it begins, and saves no callback's state without it.
        trainer.state.stateful_callbacks.setdefault(SurvivalMemo.__name__, memo.state())
    return memo
