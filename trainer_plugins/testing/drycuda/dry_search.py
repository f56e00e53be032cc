"""Runs a command with other TrainingArguments: how many rows fit, and what would make it fit.

The arguments are changed as the program makes them, so any program can be asked. Each variation
takes one run.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from trainer_plugins.advice.entry import flags_in
from trainer_plugins.planner.compare import switches
from trainer_plugins.planner.compare.lines import AS_GIVEN, SearchLine, SearchResult, line_of
from trainer_plugins.planner.compare.switches import (
    Saved,
    Switch,
    as_flags,
    batch_flags,
    explain,
    proposal_of,
    rows_in_words,
)
from trainer_plugins.planner.plan import MemoryPlan, PlanError, Proposal
from trainer_plugins.planner.tried import margin_bytes
from trainer_plugins.testing.drycuda.dry_plan import DryAnswer, DryRun, dry_plan
from trainer_plugins.units import size

_ENOUGH = 2
_MOST_OF_THE_PLANS_TIME = 1.5  # no proposal is begun after this part of it
_MORE: tuple[tuple[Switch, ...], ...] = (
    (),
    (switches.FUSED_LOSS,),
    (switches.EIGHT_BIT_OPTIMIZER,),
    (switches.FUSED_LOSS, switches.EIGHT_BIT_OPTIMIZER),
)
"""What is proposed besides checkpointing, the least costly first; each with the most rows."""


class Variations:
    """Runs one command in several ways, each once."""

    def __init__(self, run: DryRun, tell: Callable[[str], None]) -> None:
        self._run, self._tell = run, tell
        self._known: dict[str, DryAnswer] = {}
        self._seconds = 0.0  # that the command took as it is

    @cached_property
    def _as_given(self) -> DryAnswer:
        begun = time.monotonic()
        try:
            return self._answer(self._run)
        finally:
            self._seconds = time.monotonic() - begun

    @property
    def _now(self) -> int:
        return int(self._as_given.arguments["per_device_train_batch_size"])

    @property
    def _rows(self) -> int:
        return self._now * int(self._as_given.arguments["gradient_accumulation_steps"])

    @property
    def _checkpoints(self) -> bool:
        return bool(self._as_given.arguments["gradient_checkpointing"])

    @property
    def _base(self) -> tuple[Switch, ...]:
        return () if self._checkpoints else (switches.CHECKPOINTING,)

    @property
    def plan(self) -> MemoryPlan:
        """Return the plan of the command as it is."""
        return self._as_given.plan

    def search(self, show: Callable[[SearchLine], None]) -> SearchResult:
        """Find the most rows at once that fit, without and with checkpointing."""
        found: list[tuple[SearchLine, MemoryPlan]] = []
        for changes in ((), self._base)[: 2 - self._checkpoints]:
            rows, plan = self._most_rows(changes, self._rows)
            line = self._line(rows, plan, bool(changes) or self._checkpoints)
            found.append((line, plan))
            show(line)
            if rows == self._rows and self._is_safe(plan):
                break
        fit = [pair for pair in found if pair[0].is_safe] or [
            pair for pair in found if pair[0].fits
        ]
        best, best_plan = max(fit, key=lambda pair: pair[0].micro_batch, default=(None, None))
        return SearchResult(
            lines=tuple(line for line, _ in found),
            best=best,
            best_plan=best_plan,
            refused=(),
            effective_batch=self._rows * self._as_given.plan.num_gpus,
            num_gpus=self._as_given.plan.num_gpus,
            gpu=self._run.card.name,
            capacity_bytes=self._run.card.capacity_bytes,
        )

    def proposals(self) -> MemoryPlan:
        """Return the plan of the command with what would fit, if it does not fit itself."""
        plan = self.plan
        load = plan.moments.get("load")
        usable = self._run.card.capacity_bytes - self._run.card.context_bytes
        if plan.fits or load is None or load.allocated_bytes > usable:
            return plan
        found: list[Proposal] = []
        failed: list[str] = []
        until = time.monotonic() + _MOST_OF_THE_PLANS_TIME * self._seconds
        with_base = ((*self._base, *more) for more in _MORE[self._checkpoints :])
        for changes in ((), *with_base):
            if len(found) == _ENOUGH or time.monotonic() > until:
                break
            words = ", ".join(each.words for each in changes) or "fewer rows at once"
            if not changes and self._now == 1:
                continue
            try:
                rows, tried = self._most_rows(changes, self._now)
            except PlanError as error:
                failed.append(f"{words}: {error}")
                continue
            if self._is_safe(tried):
                found.append(self._proposal(changes, rows, tried))
            else:
                left = self._left(tried)
                missing = f"{size(-left)} short" if left < 0 else "the margin is too small"
                failed.append(f"{words}, {rows_in_words(1, self._rows)}: {missing}")
        return replace(plan, proposals=tuple(found), tried_without_success=tuple(failed))

    def explained(self, changes: Sequence[str]) -> tuple[MemoryPlan, tuple[Saved, ...]]:
        """Say what each of the changes saves that `changes_of` returned."""
        return explain(self._run, changes, self._plans, _turn)

    def _plans(self, runs: Sequence[DryRun]) -> list[MemoryPlan | PlanError]:
        return [*map(self._plan_or_error, runs)]

    def _plan_or_error(self, run: DryRun) -> MemoryPlan | PlanError:
        try:
            return self._answer(run).plan
        except PlanError as error:
            return error

    def _answer(self, run: DryRun) -> DryAnswer:
        key = repr((sorted(run.changed.items()), sorted(run.environment.items())))
        if key not in self._known:
            words = as_flags(run.changed)
            if words:
                self._tell(f"planning: with {words}")
            self._known[key] = dry_plan(run, self._tell)
        return self._known[key]

    def _most_rows(self, changes: Sequence[Switch], most: int) -> tuple[int, MemoryPlan]:
        """Find the most rows at once that fit safely; 1 if none do."""
        run = self._run
        for change in changes:
            run = _turn(run, change)
        sizes = [each for each in range(1, most + 1) if self._rows % each == 0]

        def plan_of(at: int) -> MemoryPlan:
            batch = batch_flags(sizes[at], self._rows) if sizes[at] != self._now else {}
            return self._answer(_with(run, batch)).plan

        low, high = 0, len(sizes) - 1
        best = plan_of(low)
        if not self._is_safe(best):
            return sizes[0], best
        while low < high:
            middle = (low + high + 1) // 2
            plan = plan_of(middle)
            if self._is_safe(plan):
                low, best = middle, plan
            else:
                high = middle - 1
        return sizes[low], best

    def _left(self, plan: MemoryPlan) -> int:
        """Return what the card has beside the least that a run needs."""
        needed = plan.smallest_card_bytes or plan.nvidia_smi_peak_bytes
        return self._run.card.capacity_bytes - needed

    def _is_safe(self, plan: MemoryPlan) -> bool:
        """Return whether it fits, even if the plan is as far off as any was."""
        return self._left(plan) >= margin_bytes(plan.reserved_peak_bytes)

    def _line(self, rows: int, plan: MemoryPlan, checkpoints: bool) -> SearchLine:
        line = line_of(
            plan,
            strategy=AS_GIVEN,
            gradient_checkpointing=checkpoints,
            sequence_length=self._as_given.tokens,
            micro_batch=rows,
            rows=self._rows,
            in_full=True,
        )
        return replace(line, margin_bytes=self._left(plan), is_safe=self._is_safe(plan))

    def _proposal(self, changes: Sequence[Switch], rows: int, plan: MemoryPlan) -> Proposal:
        proposal = proposal_of(
            plan,
            changes,
            micro_batch=rows,
            now=self._now,
            rows=self._rows,
            length=self._as_given.tokens,
        )
        return replace(proposal, margin_bytes=self._left(plan))


def _with(run: DryRun, changed: Mapping[str, object]) -> DryRun:
    return replace(run, changed={**run.changed, **changed}, snapshot=None, foretells=True)


def _turn(run: DryRun, change: Switch) -> DryRun:
    """Change a run by a switch that is a flag of TrainingArguments, or a variable."""
    if flags := flags_in(change.flags):
        return _with(run, dict(_typed(flags)))
    variable, is_one, value = change.flags.partition("=")
    if is_one and variable.isupper():
        return replace(run, environment={**run.environment, variable: value}, snapshot=None)
    raise PlanError("the command itself says this: change it there")


def _typed(flags: Mapping[str, str]) -> Iterator[tuple[str, object]]:
    for name, text in flags.items():
        as_bool = {"true": True, "false": False}.get(text.lower())
        yield name, text if as_bool is None else as_bool
