"""SurvivalMemo: what a run has learned about its limit, kept with the checkpoint and used at resume."""

import logging
import math
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from trainer_plugins.callbacks._order import move_before_trackers
from trainer_plugins.callbacks._run import RunCallback
from trainer_plugins.finding import Finding
from trainer_plugins.record.timeline import Remark
from trainer_plugins.survival.attempt.baseline import Card, card_of
from trainer_plugins.survival.limit.ladder import climb, is_checkpointing
from trainer_plugins.survival.limit.optimizer_states import create_states
from trainer_plugins.survival.limit.pace import Pace
from trainer_plugins.survival.words import thrashing

logger = logging.getLogger(__name__)


class SurvivalMemo(RunCallback, ExportableState):  # type: ignore[misc]
    """The limit, the rungs that are switched on, and how often the run survived.

    It stands for itself: transformers may build it anew at resume
    (`restore_callback_states_from_checkpoint`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.limit = math.inf
        """In cells, see `limit.py`. Infinite until something did not fit."""
        self.is_rehearsed = False
        """Whether the limit is that of the longest rows; infinite then means that all of them fit."""
        self.rungs: list[str] = []
        self.num_survived = 0
        self.num_divided = 0
        """Micro-batches that were computed in pieces, since training logged last."""
        self.learned_on: list[Any] = []
        """The size of the card, and whether activations were checkpointed anyway: the limit holds for no other."""
        self._num_logged = 0
        self._switched_on: list[str] = []
        """Of the rungs, those that are on because of us, in this process."""
        self.pace: Pace | None = None
        """Where the limit is this rank's own, and no plan's."""
        self.card: Card | None = None
        """Of the run, opened once."""
        self.is_in_step = False
        """Whether a step is being computed: what others compute between steps is none of ours."""

    def state(self) -> dict[str, Any]:
        names = ("is_rehearsed", "rungs", "num_survived", "learned_on")
        kept = {name: getattr(self, name) for name in names}
        # JSON has no infinity.
        return {
            "args": {},
            "attributes": kept if math.isinf(self.limit) else {**kept, "limit": self.limit},
        }

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.begin_run()
        move_before_trackers(self)
        self.card, self.is_in_step = card_of(args.device), False
        with self.harmless():
            self._recall(args, state, kwargs["model"])
            if said := create_states(kwargs["optimizer"]):
                logger.warning("%s", said)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.is_in_step = True

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.is_in_step = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.pace is None:
            return
        with self.harmless():
            reading = self.card.read() if self.card else None
            num_retries = reading.num_alloc_retries if reading else 0
            self.limit, is_thrashing = self.pace.after_step(self.limit, num_retries)
            if is_thrashing:
                self.remark(args, state.global_step, thrashing(self.limit))

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        numbers: dict[str, float] = {}
        if self.num_survived > self._num_logged:
            self._num_logged = numbers["out_of_memory_survived"] = self.num_survived
        logs: dict[str, float] = kwargs.get("logs") or {}
        if {
            "loss",
            "learning_rate",
        } <= logs.keys():  # training's own line: others come back from train() or evaluate()
            if not math.isinf(self.limit) or self.num_divided:
                numbers["memory/divided_micro_batches"], self.num_divided = (
                    float(self.num_divided),
                    0,
                )
            logs.update(numbers)
        if state.log_history:
            state.log_history[-1].update(
                numbers
            )  # the Trainer has put a copy of `logs` there before

    def climb(self, ladder: Iterable[str], model: nn.Module) -> str:
        """Switch the next rung on, for which the limit is open again.

        Returns its name; "" where there is none.
        """
        rung = next((rung for rung in ladder if rung not in self.rungs and climb(rung, model)), "")
        if rung:
            self.rungs.append(rung)
            self._switched_on.append(rung)
            self.limit = math.inf  # it was learned without this rung, and so was what is too much
            if self.pace is not None:
                self.pace = Pace(has_failed=True, num_retries=self.pace.num_retries)
        return rung

    def remark(self, args: TrainingArguments, step: int, finding: Finding) -> None:
        """Say a finding, and write it into the timeline of the run."""
        logger.log(finding.severity, "step %d: %s", step, finding)
        with self.harmless():
            self.timeline_for(args).add(Remark(step=step, finding=finding))

    def _recall(self, args: TrainingArguments, state: TrainerState, model: nn.Module) -> None:
        # `restore_callback_states_from_checkpoint` is off unless asked for, and a limit is no
        # setting of the user's.
        name = type(self).__name__
        kept = state.stateful_callbacks.get(name, self.state())
        # A checkpoint of a run without us lacks the entry, and the Trainer stops at the next save
        # without it.
        state.stateful_callbacks[name] = kept
        for attribute, value in kept["attributes"].items():
            setattr(self, attribute, value)
        self._num_logged = self.num_survived
        reading = self.card.read() if self.card else None
        learned_on = [
            reading.total_bytes if reading else 0,
            is_checkpointing(model) and not self.rungs,
        ]
        if learned_on != self.learned_on:
            self.limit, self.is_rehearsed, self.rungs, self.learned_on = (
                math.inf,
                False,
                [],
                learned_on,
            )
        # What the user has on by now is the user's, and what an earlier run of this Trainer has
        # switched on is ours.
        self.rungs = [
            rung for rung in self.rungs if climb(rung, model) or rung in self._switched_on
        ]
        self._switched_on = [*self.rungs]
        if not math.isinf(self.limit):
            logger.info(
                "no more than %d tokens (rows x padded length) at once, as this run learned before",
                self.limit,
            )
