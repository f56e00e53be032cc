"""Vary the TrainingArguments of a command: find the most rows that fit, and changes that help.

The arguments are changed as the program builds them, so this works with any program. Each variation
takes one run.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from importlib.util import find_spec
from itertools import islice

from trainer_plugins.accumulation import Effect
from trainer_plugins.checkpointing import is_asked
from trainer_plugins.drycuda.dry_changes import (
    Fitted,
    is_usual,
    least_bytes,
    most_rows_by,
    run_with,
    short_moments,
    turn,
)
from trainer_plugins.drycuda.dry_plan import DryAnswer, dry_plan
from trainer_plugins.drycuda.dry_run import DryRun
from trainer_plugins.planner.compare import switches
from trainer_plugins.planner.compare.lines import SearchLine, SearchResult
from trainer_plugins.planner.compare.price import Step, step_of
from trainer_plugins.planner.compare.proposal import batch_flags, proposal_of, rows_in_words
from trainer_plugins.planner.compare.saved import Saved, measure_saving, switches_in
from trainer_plugins.planner.compare.switches import Switch, source_of, write_flags
from trainer_plugins.planner.compare.ways import WAYS, effort, possible_changes
from trainer_plugins.planner.plan import MemoryPlan, Moment, PlanError, Proposal
from trainer_plugins.planner.tried import error_bytes, is_safe
from trainer_plugins.units import size

_EVALUATES: frozenset[Moment] = frozenset({"evaluation", "generation"})
_ENOUGH = 2
_MOST_OF_THE_PLANS_TIME = 1.0  # in plan times: then we stop looking for a second proposal
_MORE_SECONDS = 300  # and this much later for a first one


class Variations:
    """Runs one command in several ways, each once."""

    def __init__(self, run: DryRun, tell: Callable[[str], None]) -> None:
        self._run, self._tell = run, tell
        self._known: dict[str, DryAnswer] = {}
        self._seconds = 0.0  # of the command as it is

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
        """Describe the step, for a command as far as it is visible, without figures of the card."""
        plan, request = self.plan, self._run.of_config
        known = step_of(request, self.arguments, plan) if request is not None else None
        return known or Step(
            weights=max(1, plan.num_parameters),
            trained=plan.num_trainable_parameters,
            rows=self._rows,
            checkpoints=self._checkpoints,
        )

    @property
    def arguments(self) -> Mapping[str, object]:
        """Return the TrainingArguments of the command as it is."""
        return self._as_given.arguments

    @property
    def plan(self) -> MemoryPlan:
        """Return the plan of the command as it is."""
        return self._as_given.plan

    @property
    def fits(self) -> bool:
        """Return whether the command fits as it is, even with the planner's known error."""
        return is_safe(self.plan)

    def search(self, show: Callable[[SearchLine], None]) -> SearchResult:
        """Find the most rows at once that fit, without and with checkpointing."""
        found: list[tuple[SearchLine, MemoryPlan]] = []
        for changes in ((), (switches.CHECKPOINTING,))[: 2 - self._checkpoints]:
            rows, plan = self._most_rows(changes, self._divisors(self._rows))
            line = SearchLine(
                gradient_checkpointing=bool(changes) or self._checkpoints,
                sequence_length=self._as_given.tokens,
                micro_batch=rows,
                accumulation_steps=self._rows // rows,
                fits=bool(plan.fits),
                allocated_peak_bytes=plan.allocated_peak_bytes,
                reserved_peak_bytes=plan.reserved_peak_bytes,
                nvidia_smi_peak_bytes=plan.nvidia_smi_peak_bytes,
                margin_bytes=plan.margin_bytes or 0,
                host_ram_bytes_per_node=plan.host_ram_bytes_per_node,
                is_safe=is_safe(plan),
            )
            found.append((line, plan))
            show(line)
            if rows == self._rows and is_safe(plan):
                break
        fit = [pair for pair in found if pair[0].is_safe] or [
            pair for pair in found if pair[0].fits
        ]
        best, best_plan = max(fit, key=lambda pair: pair[0].micro_batch, default=(None, None))
        return SearchResult(
            lines=tuple(line for line, _ in found),
            best=best,
            best_plan=best_plan,
            effective_batch=self._rows * self._as_given.plan.num_gpus,
            num_gpus=self._as_given.plan.num_gpus,
            gpu=self._run.card.name,
            capacity_bytes=self._run.card.capacity_bytes,
        )

    def proposals(self) -> MemoryPlan:
        """Return the command's plan, with changes that would make it fit if it does not."""
        may_fit = self._weights_fit() or self._run.of_config is not None
        if self.plan.fits_card is not False or not may_fit:
            return self.plan
        failed: list[str] = []
        until = time.monotonic() + _MOST_OF_THE_PLANS_TIME * self._seconds
        ways, sizes = self._usual_ways, self._divisors(self._now)
        if self._weights_fit() and (rows := self._shorter_evaluation(until)):
            ways = [(*rows, *way) for way in ways]
            sizes = sizes if self._is_training_short() else [self._now]
        fitted = islice(self._find_fits(ways, sizes, failed, until), _ENOUGH)
        found = [self._proposal(*each) for each in fitted]
        return replace(self.plan, proposals=tuple(found), tried_without_success=tuple(failed))

    def first_that_fits(self, may: Collection[str]) -> tuple[Fitted | None, list[str]]:
        """Return the least costly changes with which the command fits, and the failed attempts.

        Survival divides micro-batches and evaluations if it can, so that rows, steps, schedule and
        gradients stay the same. Otherwise they stay whole, unless accumulation is known to be
        equivalent. `may` allows bf16 ("precision"), an 8-bit optimizer ("optim"), LoRA instead of
        the weights ("peft") and TRL's rows cut in half ("length"), each after changes that keep
        more.
        """
        if not self._weights_fit():
            return None, ["the weights alone do not fit"]
        now, why_whole, failed = self._now, self._explain_whole("training"), list[str]()
        sizes, until = [now], float("inf")
        effect = self.plan.accumulation
        is_same = effect is not None and effect.effect is Effect.SAME
        may_accumulate = is_same and not self.arguments.get("dataloader_drop_last")
        if why_whole and not may_accumulate:
            failed.append(f"micro-batches cannot be split: {why_whole}")
        elif self._is_training_short():
            halved = sorted({-(-now >> halving) for halving in range(now.bit_length() + 1)})
            sizes = self._divisors(now) if why_whole else halved
        ways = [(*self._shorter_evaluation(until), *way) for way in self._ways(may)]
        found = next(self._find_fits(ways, sizes, failed, until), None)
        return self._make_fitted(*found) if found is not None else None, failed

    def _explain_whole(self, what: str) -> str:
        return "; ".join(self._as_given.why_whole.get(what, ()))

    def _make_fitted(self, changes: tuple[Switch, ...], rows: int, plan: MemoryPlan) -> Fitted:
        """Return changes with which the command fits, if survival divides all it can."""
        now = self._now
        divided = [each for each in changes if each.subject == "evaluation"]
        if self._explain_whole("evaluation"):
            divided.clear()
        kept = [each for each in changes if each not in divided]
        changed = dict(reduce(turn, kept, self._run).changed)
        at_once = rows if rows != now and not self._explain_whole("training") else 0
        proposal = self._proposal(kept, now if at_once else rows, plan)
        words = [*proposal.changes, *(each.words for each in divided)]
        prices = [*filter(None, [proposal.price])]
        vouched = self._explain_whole("unless vouched") if at_once or divided else ""
        prices += filter(None, [vouched])
        if at_once:
            words.insert(0, rows_in_words(rows, self._rows))
            prices.append(f"survival splits each micro-batch of {now}, and keeps its gradient")
        elif rows != now:
            changed |= batch_flags(rows, self._rows)
            prices.append("a short last batch may be weighted by its micro-batches")
        if divided:
            prices.append("survival splits each evaluation batch, and keeps its metrics")
        return Fitted(
            replace(proposal, changes=tuple(words), price="; ".join(prices)),
            {name: self._as_given.arguments[name] for name in batch_flags(1, 1)},
            changed,
            at_once,
            bool(vouched),
        )

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
        if not find_spec("triton"):  # Liger's kernels need Triton, and the run will be here
            ways = [way for way in ways if switches.FUSED_LOSS not in way]
        return ways

    @property
    def _usual_ways(self) -> list[tuple[Switch, ...]]:
        planned = self.plan.planned
        name = (planned.get("trainer") or planned["model"]).rpartition(" ")[2]
        can_offload = switches.can_offload_activations(name.removesuffix("Trainer").lower())
        usual = [way for way in WAYS if can_offload or switches.OFFLOADED_ACTIVATIONS not in way]
        request = self._run.of_config
        if request is None:
            return usual
        more = [*possible_changes(request, self._as_given.arguments, self.plan)]
        ways = [way for each in more for way in ((each,), (each, switches.CHECKPOINTING))]
        return sorted([*usual, *ways], key=effort)

    def _weights_fit(self) -> bool:
        card, loaded = self._run.card, self.plan.loaded_bytes
        return loaded is not None and loaded <= card.capacity_bytes - card.context_bytes

    def _shorter_evaluation(self, until: float) -> tuple[Switch, ...]:
        """Return the evaluation rows with which a short evaluation fits, or is smallest."""
        given = rows = int(self._as_given.arguments["per_device_eval_batch_size"])
        plan, card = self.plan, self._run.card
        while rows > 1 and time.monotonic() < until and short_moments(plan, card) & _EVALUATES:
            rows //= 2
            smaller = self._answer(turn(self._run, switches.eval_rows(rows))).plan
            freed, plan = plan.needed_bytes - smaller.needed_bytes, smaller
            if -(plan.margin_bytes or 0) > freed:  # for example, if all outputs are kept
                return ()  # half the rows free at most half of that
        return (switches.eval_rows(rows),) if rows != given else ()

    def _is_training_short(self) -> bool:
        short = short_moments(self.plan, self._run.card)
        return not short or not short <= _EVALUATES

    def _find_fits(
        self, ways: Sequence[tuple[Switch, ...]], sizes: list[int], failed: list[str], until: float
    ) -> Iterator[tuple[tuple[Switch, ...], int, MemoryPlan]]:
        """Yield changes, rows and a plan that fits; list in `failed` the shortage of the others."""
        tried_ways: list[tuple[Switch, ...]] = [()] if sizes == [self._now] else []
        useless, has_found, seconds = list[Switch](), False, 0.0
        is_on = (switches.CHECKPOINTING,) if self._checkpoints else ()
        short = self.plan if sizes == [self._now] and () in ways else None
        if short is not None:
            failed.append(self._missing(sizes[0], short))
        for way in self._add_reduced_gradients(ways):
            changes = tuple(each for each in way if each not in is_on)
            if changes in tried_ways or any(each in useless for each in changes):
                continue
            tried_ways.append(changes)
            words = ", ".join(each.words for each in changes) or "fewer rows at once"
            if lacking := self._lacks(changes, short, sizes[0]):
                failed.append(f"{words}: at least {size(lacking)} short")
                continue
            begun = time.monotonic()
            if begun - until > (-seconds if has_found else _MORE_SECONDS):
                failed += [] if has_found else ["the rest was not tried, for lack of time"]
                return
            if self._run.of_config is not None and changes:
                self._tell(f"planning: with {words}")
            try:
                rows, tried = self._most_rows(changes, sizes, in_full=False)
            except PlanError as error:
                failed.append(f"{words}: {error}")
                continue
            finally:
                seconds = time.monotonic() - begun  # the next way will take as long
            if is_safe(tried):
                has_found = True
                yield changes, rows, tried
                continue
            if all(each.subject == "evaluation" for each in changes):
                short = tried
            elif short and len(changes) == 1 and tried.needed_bytes == short.needed_bytes:
                useless += changes
            failed.append(f"{words}, {self._missing(rows, tried)}")

    def _missing(self, rows: int, plan: MemoryPlan) -> str:
        left = plan.margin_bytes or 0
        missing = f"{size(-left)} short" if left < 0 else "the margin is too small"
        return f"{rows_in_words(rows, self._rows)}: {missing}"

    def _lacks(self, changes: Sequence[Switch], short: MemoryPlan | None, rows: int) -> int:
        """Return the shortage even if the changes free all they can; 0 if unknown.

        `short` is the plan of these rows without changes, if there is one.
        """
        plan, part = short, 1.0
        of_training = [each for each in changes if each.subject != "evaluation"]
        if plan is None:
            plan, part = self.plan, rows / self._now
            if plan.moment in _EVALUATES or len(of_training) < len(changes):
                return 0  # an evaluation has its own rows
        if not all(each.frees for each in of_training):
            return 0
        freed = {name for each in of_training for name in each.frees}
        return max(0, least_bytes(plan, freed, part) - self._run.card.capacity_bytes)

    def _add_reduced_gradients(
        self, ways: Sequence[tuple[Switch, ...]]
    ) -> Iterator[tuple[Switch, ...]]:
        """Yield each way, under FSDP also with gradients reduced in each micro-batch."""
        given = self._as_given
        # This argument holds several values: we would overwrite the user's.
        adds = given.is_fsdp and self._rows > 1 and is_usual(given.arguments)
        for way in ways:
            yield way
            if adds:
                yield (*way, switches.REDUCED_EACH_TIME)

    def explain_changes(self, changes: Sequence[str]) -> tuple[MemoryPlan, tuple[Saved, ...]]:
        """Predict the saving of each change that `changes_of` returned."""
        plan = self.plan
        return plan, tuple(measure_saving(each, plan, self._plan_with(each)) for each in changes)

    def _plan_with(self, change: str) -> MemoryPlan | PlanError:
        try:
            return self._answer(reduce(turn, switches_in(change), self._run)).plan
        except PlanError as error:
            return error

    def _answer(self, run: DryRun) -> DryAnswer:
        key = repr((sorted(run.changed.items()), sorted(run.environment.items()), run.request))
        if key not in self._known:
            if words := write_flags(run.changed):
                self._tell(f"planning: with {words}")
            self._known[key] = dry_plan(run, self._tell)
        return self._known[key]

    def _divisors(self, most: int) -> list[int]:
        return [each for each in range(1, most + 1) if self._rows % each == 0]

    def _most_rows(
        self, changes: Sequence[Switch], sizes: list[int], *, in_full: bool = True
    ) -> tuple[int, MemoryPlan]:
        """Find the most rows at once that fit safely; the fewest if none do.

        The first sizes tried are an estimate from the memory of fewer rows. Unless `in_full`, stop
        at the first size that fits.
        """
        run = reduce(turn, changes, self._run)

        def plan_of(at: int) -> MemoryPlan:
            batch = batch_flags(sizes[at], self._rows) if sizes[at] != self._now else {}
            return self._answer(run_with(run, batch)).plan

        low, high = 0, len(sizes) - 1
        best = plan_of(low)
        if not is_safe(best):
            return sizes[0], best
        while low < high:
            most = most_rows_by(best, sizes[low], (best.margin_bytes or 0) - error_bytes(best))
            likely = sum(each <= most for each in sizes) - 1
            if not in_full:
                high = min(likely, high)
            tried = min(max(low + 1, likely), high)
            plan = plan_of(tried)
            if is_safe(plan):
                low, best = tried, plan
            else:
                high = tried - 1
        return sizes[low], best

    def _proposal(self, changes: Sequence[Switch], rows: int, plan: MemoryPlan) -> Proposal:
        request = self._run.of_config
        return proposal_of(
            plan,
            changes,
            micro_batch=rows,
            now=self._now,
            rows=self._rows,
            length=self._as_given.tokens,
            trainer=source_of(request).trainer if request is not None else None,
            times=self._step.times(changes, self._now, rows),
        )
