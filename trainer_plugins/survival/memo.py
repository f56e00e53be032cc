"""SurvivalMemo: what a run has learned about its limit, kept in checkpoints and used at resume."""

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakMethod

from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from trainer_plugins.callbacks._run import RunCallback, move_before_trackers
from trainer_plugins.finding import Finding
from trainer_plugins.record.timeline import Remark
from trainer_plugins.survival.attempt.baseline import Card, card_of
from trainer_plugins.survival.limit.ladder import climb, is_checkpointing
from trainer_plugins.survival.limit.optimizer_states import create_states
from trainer_plugins.survival.limit.pace import Pace
from trainer_plugins.survival.words import thrashing
from trainer_plugins.upkeep.roll_call import RollCall

logger = logging.getLogger(__name__)


class SurvivalMemo(RunCallback, ExportableState):  # type: ignore[misc]
    """Keeps the limit, the rungs that are switched on, and how often the run survived.

    It must be constructible without arguments: transformers may recreate it at resume
    (`restore_callback_states_from_checkpoint`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.limit = math.inf
        """How many cells (`limit.py`) are computed at once; infinite until something fails."""
        self.is_rehearsed = False
        """Whether the limit was found on the longest rows; infinite: all of them fit at once."""
        self.rungs: list[str] = []
        self.num_survived = 0
        self.num_divided = 0
        """How many micro-batches were computed in pieces, since training logged last."""
        self.learned_on: list[int] = []
        """For what the limit holds: the card's size in bytes, and whether the user checkpoints."""
        self._num_logged = 0
        self._switched_on: list[str] = []
        """Those of the rungs that were switched on by us, in this process."""
        self.pace: Pace | None = None
        """Changes a limit that this rank has found for itself; None for a limit of all ranks."""
        self.card: Card | None = None
        """The card of the run, opened once."""
        self.is_in_step = False
        """Whether a step is being computed: what others compute between steps is left alone."""
        self.roll_call = RollCall("survive_oom")
        """Signed when training begins, and answered at its first micro-batch."""

    def at_rest(self) -> None:
        super().at_rest()
        self.when_over: WeakMethod[Callable[[], None]] | None = None
        """What the engine wants to be called when the training ends."""

    def state(self) -> dict[str, dict[str, object]]:
        names = ("is_rehearsed", "rungs", "num_survived", "learned_on")
        kept = {name: getattr(self, name) for name in names}
        # JSON has no infinity.
        return {
            "args": {},
            "attributes": kept if math.isinf(self.limit) else {**kept, "limit": self.limit},
        }

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **event: Any
    ) -> None:
        self.begin_run()
        self.roll_call.sign()
        move_before_trackers(self)
        self.card, self.is_in_step = card_of(args.device), False
        with self.harmless():
            self._recall(args, state, event["model"])
            if said := create_states(event["optimizer"]):
                logger.warning("%s", said)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self.is_in_step = True

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self.is_in_step = False

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        if self.pace is None:
            return
        with self.harmless():
            reading = self.card.read() if self.card else None
            num_retries = reading.num_alloc_retries if reading else 0
            self.limit, is_thrashing = self.pace.after_step(self.limit, num_retries)
            if is_thrashing:
                self.remark(args, state.global_step, thrashing(self.limit))

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        if self.when_over is not None and (forget := self.when_over()) is not None:
            forget()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        numbers: dict[str, float] = {}
        if self.num_survived > self._num_logged:
            self._num_logged = numbers["out_of_memory_survived"] = self.num_survived
        # Training's own line has both; other lines come back from train() or evaluate().
        if logs and {"loss", "learning_rate"} <= logs.keys():
            if not math.isinf(self.limit) or self.num_divided:
                numbers["memory/divided_micro_batches"] = float(self.num_divided)
                self.num_divided = 0
            logs.update(numbers)
        if state.log_history:  # the Trainer has put a copy of `logs` there before
            state.log_history[-1].update(numbers)

    def climb(self, ladder: Iterable[str], model: nn.Module) -> str:
        """Switch the next rung on; the limit is open again then.

        Returns:
            The name of the rung; empty if there is none.
        """
        rung = next((rung for rung in ladder if rung not in self.rungs and climb(rung, model)), "")
        if rung:
            self.rungs.append(rung)
            self._switched_on.append(rung)
            self.limit = math.inf  # limit and pace were learned without this rung
            if self.pace is not None:
                self.pace = Pace(has_failed=True, num_retries=self.pace.num_retries)
        return rung

    def remark(self, args: TrainingArguments, step: int, finding: Finding) -> None:
        """Log a finding, and write it into the timeline of the run."""
        logger.log(finding.severity, "step %d: %s", step, finding)
        with self.harmless():
            self.timeline_for(args).add(Remark(step=step, finding=finding))

    def _recall(self, args: TrainingArguments, state: TrainerState, model: nn.Module) -> None:
        # `restore_callback_states_from_checkpoint` is off by default, and the limit is not one of
        # the user's settings.
        name = type(self).__name__
        kept = state.stateful_callbacks.get(name, self.state())
        # A checkpoint of a run without us lacks the entry, and the Trainer stops at the next save
        # without it.
        state.stateful_callbacks[name] = kept
        for attribute, value in kept["attributes"].items():
            setattr(self, attribute, value)
        self._num_logged = self.num_survived
        reading = self.card.read() if self.card else None
        is_users_own = is_checkpointing(model) and not self.rungs
        learned_on = [reading.total_bytes if reading else 0, is_users_own]
        if learned_on != self.learned_on:
            self.limit, self.is_rehearsed, self.rungs = math.inf, False, []
            self.learned_on = learned_on
        # A rung that is on already is the user's, unless an earlier run of this Trainer has
        # switched it on.
        self.rungs = [
            rung for rung in self.rungs if climb(rung, model) or rung in self._switched_on
        ]
        self._switched_on = [*self.rungs]
        if not math.isinf(self.limit):
            logger.info(
                "no more than %d tokens (rows x padded length) at once, as this run learned before",
                self.limit,
            )
