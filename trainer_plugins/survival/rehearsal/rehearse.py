"""Run: rehearse a run whose training begins, moment by moment, and put everything back."""

import gc
from collections.abc import Callable, Iterator
from time import perf_counter

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.survival.attempt.attempt import DidNotFit
from trainer_plugins.survival.attempt.baseline import card_of
from trainer_plugins.survival.attempt.restore_point import RestorePoint
from trainer_plugins.survival.exact.layouts import Completions
from trainer_plugins.survival.exact.losses import Family, family_of
from trainer_plugins.survival.limit.optimizer_states import create_states
from trainer_plugins.survival.ranks import kind_of
from trainer_plugins.survival.refusals import cannot_be_taken_back
from trainer_plugins.survival.rehearsal.kept import Kept, sources_of
from trainer_plugins.survival.rehearsal.moments import LeftOut, Moments, NoBatch, first_words
from trainer_plugins.survival.rehearsal.report import RehearsalReport, Rehearsed, RunMoment
from trainer_plugins.upkeep.agreement import agreement_within

_ELSEWHERE = ("", "it raises on another rank", "it does not fit on another rank")
"""By the vote of the rank that has fared worst."""


def rehearse_run(trainer: HfTrainer, plan: MemoryPlan | None, saves: bool) -> RehearsalReport:
    """Rehearse a run, on all ranks together, from an event at which training begins.

    An error of a moment is reported, and not raised; except under FSDP2 and ZeRO, where the other
    ranks wait inside the same pass.

    Args:
        trainer: the Trainer, with its model wrapped and its optimizer made.
        plan: the plan of this run, if there is one.
        saves: whether a checkpoint is written, and loaded.
    """
    generators = RestorePoint(trainer)  # even the search for reasons draws, under DDP
    try:
        return _rehearsed(trainer, plan, saves)
    finally:
        generators.restore()


def _rehearsed(trainer: HfTrainer, plan: MemoryPlan | None, saves: bool) -> RehearsalReport:
    started, model = perf_counter(), trainer.model_wrapped
    kept, why = None, ""
    try:
        if not (why := "; ".join(_reasons(trainer))):
            create_states(trainer.optimizer)
            kept = Kept(trainer, model)
    except Exception as error:  # noqa: BLE001 - the user's run goes on, without a rehearsal
        why = first_words(error)
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
        if card is not None:
            card.release_cached()  # failed attempts have cut it into small pieces
            card.reset_peak()
    reading = card.read() if card is not None else None
    return RehearsalReport(
        moments=tuple(rehearsal.done),
        left_out=tuple(rehearsal.left_out),
        total_bytes=reading.total_bytes if reading else None,
        seconds=perf_counter() - started,
        plan=plan,
    )


class _Rehearsal:
    """Computes one moment after the other, and lets the ranks agree how each went."""

    def __init__(self, trainer: HfTrainer, moments: Moments) -> None:
        self._trainer, self._moments = trainer, moments
        self.done: list[Rehearsed] = []
        self.left_out: list[tuple[str, str]] = []

    def moment(self, name: RunMoment, work: Callable[[], str | DidNotFit]) -> None:
        started, failure, has_run_out, why = perf_counter(), "", False, ""
        self._moments.reset_peak()
        try:
            outcome = work()
            failure = _of_oom(outcome) if isinstance(outcome, DidNotFit) else outcome
            has_run_out = bool(failure)
        except LeftOut as error:
            why = str(error)
        except NoBatch as error:
            failure = str(error)
        except Exception as error:  # a Trainer's own methods ran
            if self._moments.is_shared:
                raise
            failure = first_words(error)
        peak_bytes = self._moments.peak_bytes()
        if failure:
            gc.collect()  # what its frames held
        vote = (1 + has_run_out) if failure else 0
        worst = _agreed(self._trainer, vote)
        if why:
            self.left_out.append((name, why))
            return
        self.done.append(
            Rehearsed(
                moment=name,
                what=self._moments.what,
                seconds=perf_counter() - started,
                peak_bytes=None if failure else peak_bytes,
                failure=failure if vote == worst else _ELSEWHERE[worst],
                has_run_out=worst == len(_ELSEWHERE) - 1,
            )
        )


def _reasons(trainer: HfTrainer) -> Iterator[str]:
    """Give every reason why nothing of a run is rehearsed."""
    yield from cannot_be_taken_back(trainer)
    if why := sources_of(trainer).why_not:
        yield why
    family = family_of(trainer)
    if isinstance(family, Family) and any(isinstance(one, Completions) for one in family.layouts):
        yield "the length of completions is not known yet"


def _agreed(trainer: HfTrainer, vote: int) -> int:
    """Return the highest vote of all ranks; this rank's own if they cannot agree."""
    highest = agreement_within(trainer.args.ddp_timeout).highest(vote)
    return vote if highest is None else highest


def _of_oom(outcome: DidNotFit) -> str:
    """Return what an OOM says, without its advice for the whole process."""
    return outcome.first_line.partition(" Including non-PyTorch")[0].rstrip(".")
