"""Rehearsal: try the worst of each moment of a run before step 1, as a callback or by a call."""

import logging
from typing import Literal

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainer_plugins.callbacks._run import RunCallback, callback_of, calling_trainer
from trainer_plugins.callbacks.preflight import LIMITS, refusal
from trainer_plugins.finding import Severity
from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.record.timeline import Remark
from trainer_plugins.survival.attempt.restore_point import RestorePoint
from trainer_plugins.survival.callback import SurviveOOM
from trainer_plugins.survival.rehearsal.kept import attributes, put_back
from trainer_plugins.survival.rehearsal.rehearse import rehearse_run
from trainer_plugins.survival.rehearsal.report import RehearsalReport
from trainer_plugins.upkeep.agreement import has_peers
from trainer_plugins.upkeep.roll_call import RollCall

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 60.0
"""How late a rank may be when training begins."""


class RehearsalError(RuntimeError):
    """Says what of a run will not fit, before its first step."""


class Rehearsal(RunCallback):
    """Tries the worst of each moment of a run before step 1, and leaves no trace.

    The moments are a step of the optimizer, the longest rows in an evaluation and in training, a
    save, and a resume from it. docs/rehearsal.md says what is computed, and what is left out.

    Cost: a few steps' time, that of one checkpoint, and a copy of the trained weights in main
    memory while it lasts.
    """

    def __init__(
        self,
        refuse_on: Literal["error", "warning"] | None = None,
        save: bool = True,
        plan: MemoryPlan | None = None,
    ) -> None:
        """Report only, or refuse.

        Args:
            refuse_on: raise before step 1, on all ranks, if a moment does not fit ("error"), or
                also if one raises ("warning"); None only reports.
            save: whether a checkpoint is written, loaded and removed again.
            plan: the plan of this run, to be reported beside what is measured.
        """
        if refuse_on is not None and refuse_on not in LIMITS:
            raise ValueError(f"refuse_on is error, warning or None, got {refuse_on!r}")
        super().__init__()
        self.refuse_on, self._saves, self._plan = refuse_on, save, plan
        self.report = RehearsalReport()
        """How it went; empty before training has begun."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Rehearse, and refuse what was to be refused.

        Raises:
            RehearsalError: something is as severe as `refuse_on`.
        """
        self.begin_run()
        if self.is_second(state):
            return
        trainer = calling_trainer()
        if trainer is None:
            logger.warning("Rehearsal does nothing: it was not called by a transformers.Trainer")
            return
        if (survives := callback_of(trainer, SurviveOOM)) is not None:
            survives.on_train_begin(args, state, control)  # it may stand behind this one
        self.report = self._rehearsed(trainer)
        with self.harmless():
            self._say(args, state)
        limit = LIMITS[self.refuse_on] if self.refuse_on is not None else None
        if limit is not None and (
            found := [each for each in self.report.findings if each.severity >= limit]
        ):
            raise RehearsalError(refusal(found))

    def _rehearsed(self, trainer: Trainer) -> RehearsalReport:
        roll = RollCall("Rehearsal")
        roll.sign()
        if has_peers() and (missing := roll.missing(_WAIT_SECONDS)):
            logger.warning("nothing is rehearsed: %s", missing)
            return RehearsalReport(left_out=(("the run", missing),))
        return rehearse_run(trainer, self._plan, self._saves)

    def _say(self, args: TrainingArguments, state: TrainerState) -> None:
        for finding in self.report.findings:
            self.timeline_for(args).add(Remark(step=state.global_step, finding=finding))
            if args.process_index == 0 or finding.severity >= Severity.ERROR:
                logger.log(finding.severity, "%s", finding)


def rehearse(trainer: Trainer, *, plan: MemoryPlan | None = None) -> RehearsalReport:
    """Rehearse a Trainer's run now, without training: `print(rehearse(trainer))`.

    What `trainer.train()` does before step 1 is done and undone: no callback of the Trainer's hears
    of it. This is for one process; several ranks take `callbacks=[Rehearsal()]`.

    Args:
        trainer: a Trainer before training.
        plan: the plan of this run, to be reported beside what is measured.

    Raises:
        ValueError: it is one of several ranks, or DeepSpeed or FSDP wrap its model.
    """
    if has_peers() or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ValueError(
            "rehearse(trainer) is for one process, without FSDP and DeepSpeed: their wrappers"
            " cannot be put on twice. Give every rank callbacks=[Rehearsal()]"
        )
    rehearsal, generators = Rehearsal(plan=plan), RestorePoint(trainer)
    owners = (trainer, trainer.model, trainer.callback_handler, trainer.accelerator)
    before = [attributes(owner) for owner in owners]
    trainer.callback_handler.callbacks = [rehearsal, _EndsHere()]
    try:
        trainer.train()
    except _Ended:
        pass
    finally:
        if (hook := vars(trainer).get("neftune_hook_handle")) is not None:
            hook.remove()
        for owner, kept in zip(owners, before, strict=True):
            put_back(owner, kept)
        generators.restore()
    return rehearsal.report


class _Ended(Exception):  # noqa: N818 - it is no error
    """Ends a training before its first step."""


class _EndsHere(TrainerCallback):  # type: ignore[misc]
    """Ends a training when it begins."""

    def on_train_begin(self, *_: object, **__: object) -> None:
        raise _Ended
