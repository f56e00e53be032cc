"""Rehearsal: try the worst of each moment of a run before step 1, as a callback or by a call."""

import gc
import logging
from collections.abc import Callable, Iterator
from enum import IntEnum
from time import perf_counter
from typing import Literal

from transformers import Trainer, TrainerCallback

from trainer_plugins.callbacks._run import RunCallback, callback_of, calling_trainer
from trainer_plugins.callbacks.preflight import LIMITS, refusal
from trainer_plugins.finding import Severity
from trainer_plugins.hf_trainer import HfArguments, HfState, HfTrainer
from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.record.timeline import Remark
from trainer_plugins.survival.attach import SurviveOOM
from trainer_plugins.survival.attempt.attempt import card_of
from trainer_plugins.survival.attempt.sources import sources_of
from trainer_plugins.survival.attempt.state import RestorePoint
from trainer_plugins.survival.exact.layouts import Completions
from trainer_plugins.survival.exact.losses import Family, family_of
from trainer_plugins.survival.limit.optimizer_states import create_states
from trainer_plugins.survival.ranks import kind_of
from trainer_plugins.survival.refusals import cannot_be_taken_back
from trainer_plugins.survival.rehearsal.kept import SOURCES, Kept, attributes, put_back
from trainer_plugins.survival.rehearsal.moments import LeftOut, Moments, NoBatch
from trainer_plugins.survival.rehearsal.report import RehearsalReport, Rehearsed, RunMoment
from trainer_plugins.upkeep.agreement import RollCall, agreement_within, has_peers
from trainer_plugins.upkeep.post_mortem import first_line

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 60.0  # how late a rank may be when training begins


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
            plan: the plan of this run, to be reported next to what is measured.
        """
        if refuse_on is not None and refuse_on not in LIMITS:
            raise ValueError(f"refuse_on is error, warning or None, got {refuse_on!r}")
        super().__init__()
        self.refuse_on, self._saves, self._plan = refuse_on, save, plan
        self.report = RehearsalReport()  # how it went; empty before training has begun

    def on_train_begin(self, args: HfArguments, state: HfState, *_: object, **__: object) -> None:
        """Rehearse; RehearsalError refuses what is as severe as `refuse_on`."""
        self.begin_run()
        if self.is_second(state):
            return
        trainer = calling_trainer()
        if trainer is None:
            logger.warning("Rehearsal does nothing: it was not called by a transformers.Trainer")
            return
        if (survives := callback_of(trainer, SurviveOOM)) is not None:
            survives.on_train_begin(args, state)  # it may stand behind this one
        self.report = self._rehearsed(trainer)
        with self.harmless():
            for finding in self.report.findings:
                self.timeline_for(args).add(Remark(step=state.global_step, finding=finding))
                if args.process_index == 0 or finding.severity >= Severity.ERROR:
                    logger.log(finding.severity, "%s", finding)
        if self.refuse_on is None:
            return
        limit = LIMITS[self.refuse_on]
        if found := [each for each in self.report.findings if each.severity >= limit]:
            raise RehearsalError(refusal(found))

    def _rehearsed(self, trainer: Trainer) -> RehearsalReport:
        roll = RollCall("Rehearsal")
        roll.sign()
        if has_peers() and (missing := roll.missing(_WAIT_SECONDS)):
            logger.warning("nothing is rehearsed: %s", missing)
            return RehearsalReport(left_out=(("the run", missing),))
        generators = RestorePoint(trainer)  # even the search for reasons draws, under DDP
        try:
            return _rehearsed(trainer, self._plan, self._saves)
        finally:
            generators.restore()


def rehearse(trainer: Trainer, *, plan: MemoryPlan | None = None) -> RehearsalReport:
    """Rehearse a Trainer's run now, without training: `print(rehearse(trainer))`.

    What `trainer.train()` does before step 1 is done and undone, and no callback of the Trainer is
    called. This is for one process; several ranks use `callbacks=[Rehearsal()]`.

    Args:
        trainer: a Trainer before training.
        plan: the plan of this run, to be reported next to what is measured.

    Raises:
        ValueError: it is one of several ranks, or DeepSpeed or FSDP wrap its model.
    """
    if has_peers() or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ValueError(
            "rehearse(trainer) is for one process, without FSDP and DeepSpeed: they cannot wrap a"
            " model twice. Give every rank callbacks=[Rehearsal()]"
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
    def on_train_begin(self, *_: object, **__: object) -> None:
        raise _Ended


class _Vote(IntEnum):
    FITS = 0
    RAISES = 1
    DOES_NOT_FIT = 2


_ELSEWHERE = {
    _Vote.FITS: "",
    _Vote.RAISES: "it raises on another rank",
    _Vote.DOES_NOT_FIT: "it does not fit on another rank",
}


def _rehearsed(trainer: HfTrainer, plan: MemoryPlan | None, saves: bool) -> RehearsalReport:
    """Rehearse a run; an error is reported, except where other ranks wait inside the same pass."""
    started, model = perf_counter(), trainer.model_wrapped
    kept, why = None, ""
    try:
        if not (why := "; ".join(_reasons(trainer))):
            create_states(trainer.optimizer)
            kept = Kept(trainer, model)
    except Exception as error:  # noqa: BLE001 - the user's run goes on, without a rehearsal
        why = first_line(error)
    if _agreed(trainer, int(kept is None)) or kept is None:
        return RehearsalReport(left_out=(("the run", why or "another rank says why"),))
    ranks, card = kind_of(trainer, model)(trainer, model), card_of(trainer.args.device)
    moments = Moments(trainer, ranks, kept, card)
    rehearsal = _Rehearsal(trainer, moments)
    try:
        for name, work in moments.of_run(saves):
            rehearsal.moment(name, work)
    finally:
        ranks.end()
        kept.restore()
        moments.clean_up()
        card.release_cached()  # failed attempts have cut it into small pieces
        card.reset_peak()
    reading = card.read()
    return RehearsalReport(
        moments=tuple(rehearsal.done),
        left_out=tuple(rehearsal.left_out),
        total_bytes=reading.total_bytes if reading else None,
        seconds=perf_counter() - started,
        plan=plan,
    )


class _Rehearsal:
    def __init__(self, trainer: HfTrainer, moments: Moments) -> None:
        self._trainer, self._moments = trainer, moments
        self.done: list[Rehearsed] = []
        self.left_out: list[tuple[str, str]] = []

    def moment(self, name: RunMoment, work: Callable[[], str]) -> None:
        started, does_not_fit, raises, left_out = perf_counter(), "", "", ""
        self._moments.card.reset_peak()
        try:
            does_not_fit = work()
        except LeftOut as error:
            left_out = str(error)
        except NoBatch as error:
            raises = str(error)
        except Exception as error:  # a Trainer's own methods ran
            if self._moments.is_shared:
                raise
            raises = first_line(error)
        peak_bytes, failure = self._moments.peak_bytes(), does_not_fit or raises
        vote = _Vote.FITS
        if failure:
            gc.collect()  # what its frames held
            vote = _Vote.DOES_NOT_FIT if does_not_fit else _Vote.RAISES
        worst = _Vote(_agreed(self._trainer, vote))
        if left_out:
            self.left_out.append((name, left_out))
            return
        self.done.append(
            Rehearsed(
                moment=name,
                what=self._moments.what,
                seconds=perf_counter() - started,
                peak_bytes=None if failure else peak_bytes,
                failure=failure if vote == worst else _ELSEWHERE[worst],
                has_run_out=worst == _Vote.DOES_NOT_FIT,
            )
        )


def _reasons(trainer: HfTrainer) -> Iterator[str]:
    yield from cannot_be_taken_back(trainer)
    if why := sources_of(trainer, *SOURCES).why_not:
        yield why
    family = family_of(trainer)
    if isinstance(family, Family) and any(isinstance(one, Completions) for one in family.layouts):
        yield "the length of completions is not known yet"


def _agreed(trainer: HfTrainer, vote: int) -> int:
    """Return the highest vote of all ranks; this rank's own if they cannot agree."""
    highest = agreement_within(trainer.args.ddp_timeout).highest(vote)
    return vote if highest is None else highest
