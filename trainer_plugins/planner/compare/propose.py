"""Find what would make a run fit, each change predicted and with its price; or its most rows."""

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import isqrt

from trainer_plugins.hf_trainer import HfArguments
from trainer_plugins.planner import progress
from trainer_plugins.planner.cards import Card
from trainer_plugins.planner.compare import switches
from trainer_plugins.planner.compare.changes import possible_changes
from trainer_plugins.planner.compare.foresight import grown
from trainer_plugins.planner.compare.price import step_of
from trainer_plugins.planner.compare.proposal import batch_flags, proposal_of, rows_in_words
from trainer_plugins.planner.compare.switches import (
    Switch,
    eval_rows,
    half_length,
    of_flags,
    source_of,
    with_flags,
)
from trainer_plugins.planner.plan import Category, MemoryPlan, PlanError, Proposal, at_least
from trainer_plugins.planner.request import PlanRequest
from trainer_plugins.planner.tried import is_safe, margin_bytes
from trainer_plugins.units import size

_ENOUGH = 4
_MUCH_SLOWER = 1.6  # times the time of a step: where a user may rather change the training
_LONGEST_REASON = 160  # characters of an error that ended a try
_DOUBT = 1.15  # what is estimated above this part of the room is not tried
_DOUBT_AFTER_A_TRY = 1.03  # the same where a part of the changes was tried
_TOGETHER = 3  # the most changes in one try, besides fewer rows
_MOST_OF_THE_PLANS_TIME = 1.2  # no probe begins after this part of the plan's CPU time
_LEAST_SECONDS = 30.0  # or after this time, if that is longer
_ROWS_TRIED = 4  # at most, to find the most rows at once
Probe = Callable[[PlanRequest], MemoryPlan]


@dataclass(frozen=True, slots=True)
class _Try:
    """Holds the changes of one try, and what came of it."""

    changes: tuple[Switch, ...]
    rows: int
    plan: MemoryPlan


class Proposer:
    """Looks for what fits, within a time; the plan itself took `seconds` of CPU time."""

    def __init__(
        self, run: PlanRequest, args: HfArguments, plan: MemoryPlan, probe: Probe, seconds: float
    ) -> None:
        assert run.card is not None
        self._run, self._args, self._plan, self._probe = run, args, plan, probe
        self._card: Card = run.card
        self._step = step_of(run, args, plan)
        self._room = run.card.capacity_bytes - run.card.context_bytes
        self._rows_now = args.per_device_train_batch_size
        self._rows = self._rows_now * args.gradient_accumulation_steps
        most_seconds = max(seconds * _MOST_OF_THE_PLANS_TIME, _LEAST_SECONDS)
        self._until = time.process_time() + most_seconds
        self._found: list[Proposal] = []
        self._failed: dict[str, MemoryPlan] = {}
        self._refused: dict[frozenset[str], str] = {}  # changes in words, and why
        self._tried: list[_Try] = []
        self._kept: list[_Try] = []

    @property
    def _is_late(self) -> bool:
        return time.process_time() > self._until

    def look(self) -> tuple[tuple[Proposal, ...], tuple[str, ...]]:
        """Return what fits, the least costly first; and what does not, with what is missing."""
        if self._only_evaluation_is_short():
            self._for_evaluation()
        else:
            self._for_training()
        missing = [f"{words}: {self._lacks(plan)}" for words, plan in self._failed.items()]
        missing += [f"{', '.join(words)}: {why}" for words, why in self._refused.items()]
        return tuple(self._found), tuple(missing)

    def most_rows(self) -> int:
        """Return the most rows at once with which a run that fits would fit too; 0 if unknown.

        What is reserved grows evenly with the rows, as far as it is known from two tries. At first
        it may not grow, where something else than rows makes the peak.
        """
        if not is_safe(self._plan):
            return self._rows_now
        known_rows, known_bytes = self._rows_now, self._plan.reserved_peak_bytes
        usable = self._room - margin_bytes(self._room, "quantised" in self._plan.planned)
        most, too_many, rows = known_rows, 1 << 30, 2 * known_rows
        for _ in range(_ROWS_TRIED):
            if self._is_late or most + 1 >= too_many:
                break
            tried = self._try((), rows, rows * self._args.gradient_accumulation_steps)
            if tried is None:
                return 0
            if is_safe(tried.plan):
                most = rows
            else:
                too_many = rows
            reserved = tried.plan.reserved_peak_bytes
            each = (reserved - known_bytes) // (rows - known_rows)
            known_rows, known_bytes = rows, reserved
            foreseen = rows + (usable - reserved) // each if each > 0 else 2 * rows
            rows = min(max(foreseen, most + 1), too_many - 1)
        return most

    def _lacks(self, plan: MemoryPlan) -> str:
        missing = plan.nvidia_smi_peak_bytes - self._card.capacity_bytes
        if missing > 0:
            return f"{size(missing)} short"
        return "fits, but the margin is below the planner's known error"

    def _only_evaluation_is_short(self) -> bool:
        """Return whether the evaluation does not fit, and all that comes before it does."""
        is_short: dict[str, bool] = {
            moment: peak.reserved_bytes > self._room for moment, peak in self._plan.moments.items()
        }
        before = ("load", "forward", "backward", "optimizer step")
        return is_short.get("evaluation", False) and not any(is_short.get(each) for each in before)

    def _for_evaluation(self) -> None:
        """Try fewer rows of an evaluation, predictions alone, and outputs to main memory."""
        rows, source = self._args.per_device_eval_batch_size, source_of(self._run)
        num_batches = source.num_evaluation_batches
        now = min(self._args.eval_accumulation_steps or num_batches, num_batches)
        fewer: tuple[Switch, ...] = ()
        while rows and not self._found and not self._is_late:
            if fewer:
                self._evaluated(fewer)
            if not self._found and source.has_metrics:
                self._evaluated((*fewer, switches.ARGMAX_LOGITS))
                self._accumulated(fewer, now)
            rows //= 2
            fewer = (eval_rows(rows),)

    def _accumulated(self, fewer: tuple[Switch, ...], now: int) -> None:
        """Find after how many batches at most the outputs have to leave the card."""
        least = self._try((*fewer, _accumulation(1)), self._rows_now)
        if least is None or not is_safe(least.plan):
            return
        grown_bytes = self._plan.allocated_peak_bytes - least.plan.allocated_peak_bytes
        batch_bytes = max(1, grown_bytes // (2 * max(1, now - 1)))  # two copies while they join
        spare = self._room - margin_bytes(self._room) - least.plan.reserved_peak_bytes
        # blocks of 1, 2, 3 ... batches are left in the cache, none large enough for the next
        most = min(now - 1, isqrt(2 * max(0, spare) // batch_bytes))
        steps = 1 << max(0, most.bit_length() - 1)
        while steps > 1 and not self._is_late:
            if self._evaluated((*fewer, _accumulation(steps))):
                return
            steps //= 2
        self._keep(least)

    def _evaluated(self, changes: tuple[Switch, ...]) -> bool:
        tried = self._try(changes, self._rows_now)
        if tried is None or not is_safe(tried.plan):
            return False
        self._keep(tried)
        return True

    def _for_training(self) -> None:
        """Try fewer rows, then changes and combinations of them, the least costly first."""
        self._fewer_rows()
        for changes in self._combined(possible_changes(self._run, self._args, self._plan)):
            if len(self._found) >= _ENOUGH or self._is_late:
                return
            if not self._is_covered(changes) and self._may_fit(changes):
                self._largest(changes)

    def _combined(self, changes: Sequence[Switch]) -> list[tuple[Switch, ...]]:
        """Return changes and combinations: those that keep the training first, then the faster."""
        found = [
            some
            for num in range(1, _TOGETHER + 1)
            for some in combinations(changes, num)
            if len({each.subject for each in some}) == num
        ]
        return sorted(found, key=lambda some: (_changes_result(some), self._times(some), len(some)))

    def _times(self, changes: Sequence[Switch]) -> float:
        """Return about how many times as long a step takes."""
        return self._step.in_order(changes, self._rows_now) if self._step else 1.0

    def _is_covered(self, changes: tuple[Switch, ...]) -> bool:
        """Return whether less is proposed already, or a part of this cannot be predicted."""
        words, subjects = {each.words for each in changes}, {each.subject for each in changes}
        if any(refused <= words for refused in self._refused):
            return True
        for kept in self._kept:
            more = _changes_result(changes) > _changes_result(kept.changes)
            is_part = {each.subject for each in kept.changes} <= subjects
            if is_part and (more or kept.rows == self._rows_now):
                return True
            if more and self._times(kept.changes) < _MUCH_SLOWER:
                return True
            again = (each for each in kept.changes if each in changes)
            if any(self._times((each,)) > _MUCH_SLOWER for each in again):
                return True
        return False

    def _may_fit(self, changes: tuple[Switch, ...]) -> bool:
        """Return whether one row may fit with these changes, by what the nearest try showed."""
        if _at_step(self._plan, changes) > self._room:
            return False
        known, others, doubt = _Try((), self._rows_now, self._plan), changes, _DOUBT
        for one in self._tried:
            left = tuple(each for each in changes if each not in one.changes)
            is_part = all(each in changes for each in one.changes)
            if is_part and len(left) < len(others):
                known, others, doubt = one, left, _DOUBT_AFTER_A_TRY
        return _about(known.plan, others, known.rows) <= doubt * self._room

    def _sizes(self) -> list[int]:
        """Return the possible numbers of rows at once, the most first."""
        return [each for each in range(self._rows_now, 0, -1) if self._rows % each == 0]

    def _fewer_rows(self) -> None:
        """Propose the most rows at once that fit without another change."""
        plan, now = self._plan, self._rows_now
        likely = [each for each in self._sizes()[1:] if grown(plan, each / now) < self._room]
        if likely:
            self._first_safe((), likely)

    def _largest(self, changes: tuple[Switch, ...]) -> None:
        """Find the most rows at once that fit with these changes, and propose it."""
        sizes = self._sizes()
        smallest = self._try(changes, sizes[-1])
        if smallest is None or not is_safe(smallest.plan):
            return
        usable = self._room - margin_bytes(self._room, "quantised" in self._plan.planned)
        likely = [each for each in sizes[:-1] if grown(smallest.plan, each / sizes[-1]) < usable]
        found = self._first_safe(changes, likely) if likely and not self._is_late else None
        if found is None or not is_safe(found.plan):
            self._keep(smallest)

    def _first_safe(self, changes: tuple[Switch, ...], sizes: list[int]) -> _Try | None:
        tried, before = None, _Try((), self._rows_now, self._plan)
        for rows in sizes:
            if tried is not None and self._is_late:
                return tried
            tried = self._try(changes, rows)
            if tried is None:
                return None
            if is_safe(tried.plan):
                self._keep(tried)
                return tried
            if not changes and _with_one_row(before, tried) > _DOUBT * self._card.capacity_bytes:
                return tried
            before = tried
        return tried

    def _try(
        self, changes: tuple[Switch, ...], rows: int, all_rows: int | None = None
    ) -> _Try | None:
        all_rows = all_rows or self._rows
        words = ", ".join((rows_in_words(rows, all_rows), *(each.words for each in changes)))
        progress.part(f"looking for what would fit: {words}")
        try:
            run = with_flags(self._run, **batch_flags(rows, all_rows))
            for change in changes:
                run = change.turn(run)
            plan = self._probe(run)
        except PlanError as error:
            self._refuse(frozenset(each.words for each in changes), error)
            return None
        # an unexpected error of one try must not take the plan
        except Exception:  # noqa: BLE001
            traceback.print_exc()
            return None
        if not is_safe(plan):
            self._failed[words] = plan
        tried = _Try(changes, rows, plan)
        self._tried.append(tried)
        return tried

    def _refuse(self, words: frozenset[str], error: PlanError) -> None:
        """Note which changes cannot be planned: what those have in common that fail alike."""
        why = str(error).partition(". ")[0][:_LONGEST_REASON]
        for other, same in [*self._refused.items()]:
            if same == why and (common := other & words):
                del self._refused[other]
                words = common
        if words:
            self._refused[words] = why

    def _keep(self, tried: _Try) -> None:
        """Propose a try, unless fewer changes allow as many rows."""
        if tried.rows == self._rows:  # a step of one micro-batch reduces its gradients anyway
            left = tuple(each for each in tried.changes if each != switches.REDUCED_EACH_TIME)
            tried = replace(tried, changes=left)
        for kept in self._kept:
            if kept.rows >= tried.rows and all(each in tried.changes for each in kept.changes):
                return
        source, plan = source_of(self._run), tried.plan
        half, is_half = half_length(source), switches.HALF_LENGTH in tried.changes
        self._kept.append(tried)
        time = at_least(plan.streamed.copy_seconds_per_step) if plan.streamed else ""
        self._found.append(
            proposal_of(
                plan,
                tried.changes,
                micro_batch=tried.rows,
                now=self._rows_now,
                rows=self._rows,
                length=half if is_half else source.sequence_length,
                values={"time": time, "length": half},
                trainer=source.trainer,
                times=self._step.times(tried.changes, self._rows_now, tried.rows)
                if self._step and not self._only_evaluation_is_short()
                else None,
            )
        )


def _with_one_row(more: _Try, fewer: _Try) -> int:
    """Return about what one row at once needs, from what more and fewer rows need."""
    least, most = fewer.plan.nvidia_smi_peak_bytes, more.plan.nvidia_smi_peak_bytes
    return least - (most - least) * (fewer.rows - 1) // (more.rows - fewer.rows)


def _changes_result(changes: Sequence[Switch]) -> int:
    return max((each.changes_result for each in changes), default=0)


def _about(plan: MemoryPlan, changes: Sequence[Switch], rows: int) -> int:
    """Return about what a plan of `rows` rows needs at its peak with one row and these changes."""
    left: dict[Category, float] = {**plan.breakdown}
    left["activations"] = left.get("activations", 0) / rows
    left["logits and loss"] = left.get("logits and loss", 0) / rows
    for change in changes:
        for category, fraction in change.frees.items():
            left[category] = left.get(category, 0) * (1 - fraction)
    return int(sum(left.values()))


def _at_step(plan: MemoryPlan, changes: Sequence[Switch]) -> int:
    """Return about what an optimizer step needs; 0 if these changes alter what is trained."""
    if any("gradients" in each.frees for each in changes) or "optimizer step" not in plan.moments:
        return 0
    there = {"weights", "frozen weights", "optimizer states", "vLLM"}
    if plan.moment == "optimizer step":
        there.add("activations")  # temporaries of the optimizer
    freed = sum(
        fraction * plan.breakdown.get(category, 0)
        for change in changes
        for category, fraction in change.frees.items()
        if category in there
    )
    return int(plan.moments["optimizer step"].allocated_bytes - freed)


def _accumulation(steps: int) -> Switch:
    words = f"outputs to main memory after {steps} batch{'es' if steps > 1 else ''}"
    return of_flags(words, "outputs wait in main memory", eval_accumulation_steps=steps)
