"""Find changes with which a run would fit that does not: few, each predicted and with its price."""

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from math import isqrt

from trainer_plugins.hf_trainer import HfArguments
from trainer_plugins.launch import configs
from trainer_plugins.planner import progress
from trainer_plugins.planner.cards import Card
from trainer_plugins.planner.compare import switches
from trainer_plugins.planner.compare.foresight import grown
from trainer_plugins.planner.compare.switches import (
    Switch,
    batch_flags,
    half_length,
    of_flags,
    proposal_of,
    rows_in_words,
    source_of,
    with_flags,
)
from trainer_plugins.planner.kind import text_of
from trainer_plugins.planner.plan import MemoryPlan, Proposal, at_least
from trainer_plugins.planner.request import PlanRequest
from trainer_plugins.planner.tried import is_safe, margin_bytes
from trainer_plugins.units import size

_ENOUGH = 4
_MOST_OF_THE_PLANS_TIME = 1.2  # no probe begins after this part of the plan's CPU time
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
        self._room = run.card.capacity_bytes - run.card.context_bytes
        self._rows_now = args.per_device_train_batch_size
        self._rows = self._rows_now * args.gradient_accumulation_steps
        self._until = time.process_time() + seconds * _MOST_OF_THE_PLANS_TIME
        self._found: list[Proposal] = []
        self._failed: dict[str, MemoryPlan] = {}

    @property
    def _is_late(self) -> bool:
        return time.process_time() > self._until

    def look(self) -> tuple[tuple[Proposal, ...], tuple[str, ...]]:
        """Return what fits, the least costly first; and what does not, with what is missing."""
        if self._only_evaluation_is_short():
            self._for_evaluation()
        else:
            self._for_training()
        missing = tuple(f"{words}: {self._lacks(plan)}" for words, plan in self._failed.items())
        return tuple(self._found), missing

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
        """Try fewer rows of an evaluation, and outputs to main memory earlier."""
        rows, source = self._args.per_device_eval_batch_size, source_of(self._run)
        num_batches = source.num_evaluation_batches
        now = min(self._args.eval_accumulation_steps or num_batches, num_batches)
        fewer: tuple[Switch, ...] = ()
        while rows and not self._found and not self._is_late:
            if fewer:
                self._evaluated(fewer)
            if not self._found and source.has_metrics:
                self._accumulated(fewer, now)
            rows //= 2
            fewer = (_eval_rows(rows),)

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
        base: tuple[Switch, ...] = ()
        if not self._args.gradient_checkpointing:
            self._fewer_rows()
            base = (switches.CHECKPOINTING,)
        with_base = self._largest(base)
        if with_base is not None and not is_safe(with_base.plan):
            self._with_more(base, with_base.plan)

    def _with_more(self, base: tuple[Switch, ...], plan: MemoryPlan) -> None:
        """Try one more change, then two, each with fewest rows first."""
        more = _changes(self._run, self._args, plan)
        alone: dict[str, MemoryPlan] = {}
        for extra in (*((each,) for each in more), *combinations(more, 2)):
            if len(self._found) >= _ENOUGH or self._is_late:
                return
            # what one change has brought is known then, and not only the most of it
            leasts = [
                _least(alone[one.words], (other,))
                for one, other in permutations(extra, 2)
                if one.words in alone
            ]
            least = max(_least(plan, extra), *leasts, 0)
            if self._is_covered(extra) or least > self._card.capacity_bytes:
                continue
            tried = self._largest((*base, *extra))
            if tried is not None and len(extra) == 1:
                alone[extra[0].words] = tried.plan

    def _is_covered(self, extra: tuple[Switch, ...]) -> bool:
        """Return whether a part of these changes is enough."""
        words = {each.words for each in extra}
        return any(words & {*found.changes} for found in self._found)

    def _sizes(self) -> list[int]:
        """Return the possible numbers of rows at once, the most first."""
        return [each for each in range(self._rows_now, 0, -1) if self._rows % each == 0]

    def _fewer_rows(self) -> None:
        """Propose the most rows at once that fit without another change."""
        plan, now = self._plan, self._rows_now
        likely = [each for each in self._sizes()[1:] if grown(plan, each / now) < self._room]
        if likely:
            self._first_safe((), likely)

    def _largest(self, changes: tuple[Switch, ...]) -> _Try | None:
        """Find the most rows at once that fit, and propose it; None if it cannot be predicted."""
        sizes = self._sizes()
        smallest = self._try(changes, sizes[-1])
        if smallest is None or not is_safe(smallest.plan):
            return smallest
        usable = self._room - margin_bytes(self._room)
        likely = [each for each in sizes[:-1] if grown(smallest.plan, each / sizes[-1]) < usable]
        found = self._first_safe(changes, likely) if likely and not self._is_late else None
        if found is None or not is_safe(found.plan):
            self._keep(smallest)
            return smallest
        return found

    def _first_safe(self, changes: tuple[Switch, ...], sizes: list[int]) -> _Try | None:
        tried = None
        for rows in sizes:
            if tried is not None and self._is_late:
                return tried
            tried = self._try(changes, rows)
            if tried is None:
                return None
            if is_safe(tried.plan):
                self._keep(tried)
                return tried
        return tried

    def _try(self, changes: tuple[Switch, ...], rows: int) -> _Try | None:
        words = ", ".join((rows_in_words(rows, self._rows), *(each.words for each in changes)))
        progress.part(f"looking for what would fit: {words}")
        try:
            run = with_flags(self._run, **batch_flags(rows, self._rows))
            for change in changes:
                run = change.turn(run)
            plan = self._probe(run)
        # an unexpected error of one try must not take the plan
        except Exception:  # noqa: BLE001
            traceback.print_exc()
            return None
        if not is_safe(plan):
            self._failed[words] = plan
        return _Try(changes, rows, plan)

    def _keep(self, tried: _Try) -> None:
        source, plan = source_of(self._run), tried.plan
        half, is_half = half_length(source), switches.HALF_LENGTH in tried.changes
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
            )
        )


def _least(plan: MemoryPlan, changes: tuple[Switch, ...]) -> int:
    """Return the least that a run needs with these changes; 0 if that is unknown."""
    if not all(each.frees for each in changes):
        return 0
    left = dict(plan.breakdown)
    for change in changes:
        for category, fraction in change.frees.items():
            left[category] = int(left.get(category, 0) * (1 - fraction))
    return sum(left.values()) + plan.context_bytes


def _file(words: str, price: str, name: str) -> Switch:
    path = str(configs.path(name))
    flags = f"--accelerate-config {path}"
    return Switch(words, price, flags, lambda run: replace(run, launch_file=path))


def _eval_rows(rows: int) -> Switch:
    words = f"{rows} row{'s' if rows > 1 else ''} at once in the evaluation"
    return of_flags(words, "the same metrics in more batches", per_device_eval_batch_size=rows)


def _accumulation(steps: int) -> Switch:
    words = f"outputs to main memory after {steps} batch{'es' if steps > 1 else ''}"
    return of_flags(words, "outputs wait in main memory", eval_accumulation_steps=steps)


def _changes(run: PlanRequest, args: HfArguments, plan: MemoryPlan) -> list[Switch]:
    """Return what can be changed in this run, the least costly first."""
    source, optimizer = source_of(run), text_of(args.optim)
    found = []
    if optimizer == "adamw_torch" and plan.moment == "optimizer step":
        found.append(switches.FUSED_OPTIMIZER)
    found.append(switches.FUSED_LOSS)
    if "8bit" not in optimizer:
        found.append(switches.EIGHT_BIT_OPTIMIZER)
    if source.sequence_length > 1:
        found.append(switches.HALF_LENGTH)
    if _is_alone(run, args):
        if run.num_gpus > 1:
            found.append(_file("ZeRO-3", "more traffic between the cards", "zero3"))
            price = "states in main memory, slower steps"
            found.append(_file("ZeRO-3 with offload", price, "zero3_offload_all"))
        elif source.peft is None:
            price = "states and weights in main memory, slower steps"
            found.append(_file("offload", price, "one_gpu_7b_offload"))
    return [*found[:2], *_adapters(run, args), *found[2:]]


def _is_alone(run: PlanRequest, args: HfArguments) -> bool:
    return run.launch_file is None and not args.deepspeed and not args.fsdp


def _adapters(run: PlanRequest, args: HfArguments) -> list[Switch]:
    """Return the ways to train an adapter: on the base as it is, streamed, or in 4 bits."""
    source, has_adapter = source_of(run), source_of(run).peft is not None
    is_quantised = source.quantisation is not None or "quantization_config" in source.config
    found = []
    if has_adapter and is_quantised and source.prepares_kbit and source.trainer is None:
        found.append(switches.UNPREPARED)
    if has_adapter and run.resident_layers is None and _is_alone(run, args):
        found.append(switches.STREAMED_BASE)
    if not has_adapter:
        found.append(switches.ADAPTER)
    if not is_quantised and _is_alone(run, args):
        found.append(switches.BASE_IN_4_BITS if has_adapter else switches.QLORA)
    return found
