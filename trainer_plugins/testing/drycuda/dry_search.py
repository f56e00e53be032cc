"""Runs a command with other TrainingArguments: how many rows fit, and what would make it fit.

The arguments are changed as the program makes them, so any program can be asked. Each variation
takes one run.
"""

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from itertools import islice
from typing import Any, NamedTuple

from trainer_plugins.advice.entry import flags_in
from trainer_plugins.checkpointing import is_asked
from trainer_plugins.planner.compare import switches
from trainer_plugins.planner.compare.lines import AS_GIVEN, SearchLine, SearchResult, line_of
from trainer_plugins.planner.compare.price import Step
from trainer_plugins.planner.compare.saved import Saved, explain
from trainer_plugins.planner.compare.switches import (
    Switch,
    as_flags,
    batch_flags,
    proposal_of,
    rows_in_words,
)
from trainer_plugins.planner.plan import MemoryPlan, PlanError, Proposal
from trainer_plugins.planner.tried import margin_bytes
from trainer_plugins.testing.drycuda.dry_plan import DryAnswer, dry_plan
from trainer_plugins.testing.drycuda.dry_run import DryRun
from trainer_plugins.units import size

_ENOUGH = 2
_MOST_OF_THE_PLANS_TIME = 1.5  # no proposal is begun after this part of it
_WAYS: tuple[tuple[Switch, ...], ...] = (
    (),
    (switches.FUSED_LOSS,),
    (switches.CHECKPOINTING,),
    (switches.FUSED_LOSS, switches.CHECKPOINTING),
    (switches.OFFLOADED_ACTIVATIONS,),
    (switches.FUSED_LOSS, switches.OFFLOADED_ACTIVATIONS),
    (switches.CHECKPOINTING, switches.EIGHT_BIT_OPTIMIZER),
    (switches.FUSED_LOSS, switches.CHECKPOINTING, switches.EIGHT_BIT_OPTIMIZER),
)
"""What is tried besides fewer rows: the ways that keep the training first, then the faster."""


class Fitted(NamedTuple):
    """Holds arguments with which a command fits."""

    proposal: Proposal
    planned: Mapping[str, object]
    """Some of the TrainingArguments with which the command was planned."""

    changed: Mapping[str, object]
    """The TrainingArguments that are to be others."""


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
        return is_asked(self._as_given.arguments)

    @property
    def _step(self) -> Step:
        """Describe the step as far as a command shows it: no figure of the card helps."""
        plan = self.plan
        return Step(
            weights=max(1, plan.num_parameters),
            trained=plan.num_trainable_parameters,
            rows=self._rows,
            checkpoints=self._checkpoints,
        )

    @property
    def plan(self) -> MemoryPlan:
        """Return the plan of the command as it is."""
        return self._as_given.plan

    @property
    def fits(self) -> bool:
        """Return whether the command fits as it is, with the planner's known error to spare."""
        return self._is_safe(self.plan)

    def search(self, show: Callable[[SearchLine], None]) -> SearchResult:
        """Find the most rows at once that fit, without and with checkpointing."""
        found: list[tuple[SearchLine, MemoryPlan]] = []
        for changes in ((), (switches.CHECKPOINTING,))[: 2 - self._checkpoints]:
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
        if self.plan.fits or not self._weights_fit():
            return self.plan
        failed: list[str] = []
        until = time.monotonic() + _MOST_OF_THE_PLANS_TIME * self._seconds
        found = [
            each.proposal for each in islice(self._fitted(self._usual_ways, failed, until), _ENOUGH)
        ]
        return replace(self.plan, proposals=tuple(found), tried_without_success=tuple(failed))

    def first_that_fits(self, may: Collection[str]) -> tuple[Fitted | None, list[str]]:
        """Return the least costly arguments with which the command fits, and what does not.

        The rows between optimizer steps stay the same, and so does the result, except for rounding;
        `may` allows bf16 ("precision"), an optimizer in 8 bits ("optim"), LoRA instead of the
        weights ("peft") and TRL's rows cut in half ("length"), each after what keeps more.
        """
        failed: list[str] = []
        if not self._weights_fit():
            return None, ["the weights alone do not fit"]
        return next(self._fitted(self._ways(may), failed, float("inf")), None), failed

    def _ways(self, may: Collection[str]) -> list[tuple[Switch, ...]]:
        given, allowed = self._as_given.arguments, list[Switch]()
        kept = [way for way in self._usual_ways if not any(each.changes_result for each in way)]
        ways = [*kept]
        if "precision" in may and not (given["bf16"] or given["fp16"]):
            allowed.append(switches.BF16)
            ways += [(*way, *allowed) for way in kept]
        if "optim" in may:
            ways += [(*way, *allowed) for way in self._usual_ways if way not in kept]
        if "peft" in may and self.plan.num_trainable_parameters == self.plan.num_parameters:
            allowed.append(switches.ADAPTER_IN_SCRIPT)
            ways += [(*way, *allowed) for way in kept]
        if "length" in may and (length := given.get("max_length")):
            allowed.append(switches.cut_at(int(length) // 2))
            ways += [(*way, *allowed) for way in kept]
        return ways

    @property
    def _usual_ways(self) -> list[tuple[Switch, ...]]:
        planned = self.plan.planned
        name = (planned.get("trainer") or planned["model"]).rpartition(" ")[2]
        can_offload = switches.can_offload_activations(name.removesuffix("Trainer").lower())
        return [way for way in _WAYS if can_offload or switches.OFFLOADED_ACTIVATIONS not in way]

    def _weights_fit(self) -> bool:
        load, card = self.plan.moments.get("load"), self._run.card
        usable = card.capacity_bytes - card.context_bytes
        return load is not None and load.allocated_bytes <= usable

    def _fitted(
        self, ways: Sequence[tuple[Switch, ...]], failed: list[str], until: float
    ) -> Iterator[Fitted]:
        """Yield arguments that fit, and say of the others what is missing."""
        if self._only_evaluation_is_short():
            rows = int(self._as_given.arguments["per_device_eval_batch_size"])
            halves = (rows >> power for power in range(1, rows.bit_length()))
            ways = [(switches.eval_rows(each),) for each in halves]
        tried_ways: list[tuple[Switch, ...]] = [()] if self._now == 1 else []
        for way in self._with_gradients(ways):
            changes = tuple(each for each in way if not self._is_on(each))
            if changes in tried_ways:
                continue
            tried_ways.append(changes)
            words = ", ".join(each.words for each in changes) or "fewer rows at once"
            if time.monotonic() > until:
                return
            try:
                rows, tried = self._most_rows(changes, self._now)
            except PlanError as error:
                failed.append(f"{words}: {error}")
                continue
            if self._is_safe(tried):
                yield self._as_fitted(changes, rows, tried)
                continue
            left = self.spare_bytes(tried)
            missing = f"{size(-left)} short" if left < 0 else "the margin is too small"
            failed.append(f"{words}, {rows_in_words(1, self._rows)}: {missing}")

    def _with_gradients(self, ways: Sequence[tuple[Switch, ...]]) -> Iterator[tuple[Switch, ...]]:
        """Yield each way, under FSDP also with gradients that each micro-batch reduces."""
        given = self._as_given
        # this argument holds several values: what a user has set there would be lost
        adds = given.is_fsdp and self._rows > 1 and _is_usual(given.arguments)
        for way in ways:
            yield way
            if adds:
                yield (*way, switches.REDUCED_EACH_TIME)

    def _is_on(self, change: Switch) -> bool:
        return change == switches.CHECKPOINTING and self._checkpoints

    def _as_fitted(self, changes: Sequence[Switch], rows: int, tried: MemoryPlan) -> Fitted:
        batch = batch_flags(rows, self._rows) if rows != self._now else {}
        return Fitted(
            self._proposal(changes, rows, tried),
            {name: self._as_given.arguments[name] for name in batch_flags(1, 1)},
            {**reduce(_turn, changes, self._run).changed, **batch},
        )

    def _only_evaluation_is_short(self) -> bool:
        usable = self._run.card.capacity_bytes - self._run.card.context_bytes
        moments = self.plan.moments
        is_short = [name for name, peak in moments.items() if peak.allocated_bytes > usable]
        return is_short == ["evaluation"]

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
        run = reduce(_turn, changes, self._run)
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

    def spare_bytes(self, plan: MemoryPlan) -> int:
        """Return what the card has beside the least that a run needs."""
        needed = plan.smallest_card_bytes or plan.nvidia_smi_peak_bytes
        return self._run.card.capacity_bytes - needed

    def _is_safe(self, plan: MemoryPlan) -> bool:
        """Return whether it fits, even if the plan is as far off as any was."""
        return self.spare_bytes(plan) >= margin_bytes(plan.reserved_peak_bytes)

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
        return replace(line, margin_bytes=self.spare_bytes(plan), is_safe=self._is_safe(plan))

    def _proposal(self, changes: Sequence[Switch], rows: int, plan: MemoryPlan) -> Proposal:
        proposal = proposal_of(
            plan,
            changes,
            micro_batch=rows,
            now=self._now,
            rows=self._rows,
            length=self._as_given.tokens,
            times=self._step.times(changes, self._now, rows),
        )
        return replace(proposal, margin_bytes=self.spare_bytes(plan))


def _is_usual(arguments: Mapping[str, Any]) -> bool:
    """Return whether accelerate's settings are its own."""
    from transformers.trainer_pt_utils import AcceleratorConfig

    return bool(arguments["accelerator_config"] == AcceleratorConfig().to_dict())


def _with(run: DryRun, changed: Mapping[str, object]) -> DryRun:
    return replace(run, changed={**run.changed, **changed}, snapshot=None, foretells=True)


def _turn(run: DryRun, change: Switch) -> DryRun:
    """Change a run by a switch that is a flag of TrainingArguments, a variable, or an adapter."""
    if change == switches.ADAPTER_IN_SCRIPT:
        return _with(run, {"peft_config": switches.LORA})
    if flags := flags_in(change.flags):
        return _with(run, dict(_typed(flags)))
    variable, is_one, value = change.flags.partition("=")
    if is_one and variable.isupper():
        return replace(run, environment={**run.environment, variable: value}, snapshot=None)
    raise PlanError("the command itself says this: change it there")


def _typed(flags: Mapping[str, str]) -> Iterator[tuple[str, object]]:
    """Yield values as TrainingArguments hold them: numbers, booleans, mappings and words."""
    booleans: Mapping[str, object] = {"True": True, "False": False}
    for name, text in flags.items():
        is_json = text.isdigit() or text.startswith("{")
        yield name, json.loads(text) if is_json else booleans.get(text, text)
