"""Find with what a run would fit that does not: few changes, each predicted and with its price.

The rows between two optimizer steps stay the same. What leaves the training as it is comes first:
fewer rows at once, then checkpointing. If that is too little, one change more is tried, or two.
"""

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
from trainer_plugins.planner.compare.foresight import grown
from trainer_plugins.planner.compare.switches import (
    IN_4_BITS,
    LORA,
    NOT_PREPARED,
    STREAM,
    as_flags,
    half_as_long,
    not_prepared,
    source_of,
    with_adapter,
    with_base_in_4_bits,
    with_base_streamed,
    with_flags,
)
from trainer_plugins.planner.kind import text_of
from trainer_plugins.planner.plan import Category, MemoryPlan, Proposal, at_least
from trainer_plugins.planner.request import ConfigSource, PlanRequest
from trainer_plugins.planner.tried import is_safe, margin_bytes
from trainer_plugins.units import size

_ENOUGH = 4
_MOST_OF_THE_PLANS_TIME = 1.2
"""No probe is begun after so many times the CPU time of the plan itself. A probe takes less than
that of the plan, so that both are done in three times at most."""

Probe = Callable[[PlanRequest], MemoryPlan]


@dataclass(frozen=True, slots=True)
class _Change:
    """Describes one thing to change, besides the rows."""

    words: str
    price: str
    flags: str
    turn: Callable[[PlanRequest], PlanRequest]
    frees: dict[Category, float]
    """How much of each category it can free at most, as a fraction; empty if that is unknown."""


@dataclass(frozen=True, slots=True)
class _Try:
    """Holds the changes of one try, and what came of it."""

    changes: tuple[_Change, ...]
    rows: int
    plan: MemoryPlan


class Proposer:
    """Looks for what fits, within a time.

    Args:
        run: the run that does not fit, with a card and with flags.
        args: its TrainingArguments.
        plan: its plan.
        probe: predicts a run nearly.
        seconds: the CPU seconds that the plan took.
    """

    def __init__(
        self, run: PlanRequest, args: HfArguments, plan: MemoryPlan, probe: Probe, seconds: float
    ) -> None:
        assert run.card is not None
        self._run, self._args, self._plan, self._probe = run, args, plan, probe
        self._card: Card = run.card
        self._room = run.card.capacity_bytes - run.card.context_bytes
        self._rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self._until = time.process_time() + seconds * _MOST_OF_THE_PLANS_TIME
        self._found: list[Proposal] = []
        self._failed: dict[str, MemoryPlan] = {}

    def look(self) -> tuple[tuple[Proposal, ...], tuple[str, ...]]:
        """Return what fits, the least costly first; and what does not, with what is missing."""
        if self._only_evaluation_is_short():
            self._for_evaluation()
        else:
            self._for_training()
        missing = tuple(
            f"{words}: {size(plan.nvidia_smi_peak_bytes - self._card.capacity_bytes)} short"
            if plan.nvidia_smi_peak_bytes > self._card.capacity_bytes
            else f"{words}: fits, with less to spare than plans are known to be wrong"
            for words, plan in self._failed.items()
        )
        return tuple(self._found), missing

    def _only_evaluation_is_short(self) -> bool:
        """Return whether the evaluation does not fit, and all that comes before it does."""
        is_short: dict[str, bool] = {
            moment: peak.reserved_bytes > self._room for moment, peak in self._plan.moments.items()
        }
        before = ("load", "forward", "backward", "optimizer step")
        return is_short.get("evaluation", False) and not any(is_short.get(each) for each in before)

    def _for_evaluation(self) -> None:
        """Try fewer rows of an evaluation at once, and sending outputs to main memory earlier.

        The training stays as it is, and so do the metrics.
        """
        rows = self._args.per_device_eval_batch_size
        num_batches = source_of(self._run).num_evaluation_batches
        now = min(self._args.eval_accumulation_steps or num_batches, num_batches)
        while rows and not self._found and time.process_time() < self._until:
            fewer = () if rows == self._args.per_device_eval_batch_size else (_eval_rows(rows),)
            if fewer:
                self._evaluated(fewer)
            if not self._found and source_of(self._run).has_metrics:
                self._accumulated(fewer, now)
            rows //= 2

    def _accumulated(self, fewer: tuple[_Change, ...], now: int) -> None:
        """Find after how many batches at most the outputs have to leave the card."""
        least = self._try((*fewer, _accumulation(1)), self._args.per_device_train_batch_size)
        if least is None or not is_safe(least.plan):
            return
        grown_bytes = self._plan.allocated_peak_bytes - least.plan.allocated_peak_bytes
        batch_bytes = max(1, grown_bytes // (2 * max(1, now - 1)))  # two copies while they join
        spare = self._room - margin_bytes(self._room) - least.plan.reserved_peak_bytes
        # blocks of 1, 2, 3 ... batches are left in the cache, none large enough for the next
        most = min(now - 1, isqrt(2 * max(0, spare) // batch_bytes))
        steps = 1 << max(0, most.bit_length() - 1)
        while steps > 1 and time.process_time() < self._until:
            if self._evaluated((*fewer, _accumulation(steps))):
                return
            steps //= 2
        self._keep(least)

    def _evaluated(self, changes: tuple[_Change, ...]) -> bool:
        tried = self._try(changes, self._args.per_device_train_batch_size)
        if tried is None or not is_safe(tried.plan):
            return False
        self._keep(tried)
        return True

    def _for_training(self) -> None:
        base: tuple[_Change, ...] = ()
        if not self._args.gradient_checkpointing:
            self._largest((), self._plan)
            base = (_CHECKPOINTING,)
        with_base = self._largest(base, None) if base else self._largest((), None)
        if with_base is not None and not is_safe(with_base.plan):
            self._with_more(base, with_base.plan)

    def _with_more(self, base: tuple[_Change, ...], plan: MemoryPlan) -> None:
        """Try one more change, then two, each with fewest rows first."""
        more = _changes(self._run, self._args, plan)
        alone: dict[str, MemoryPlan] = {}
        for extra in (*((each,) for each in more), *combinations(more, 2)):
            if len(self._found) >= _ENOUGH or time.process_time() > self._until:
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
            tried = self._largest((*base, *extra), None)
            if tried is not None and len(extra) == 1:
                alone[extra[0].words] = tried.plan

    def _is_covered(self, extra: tuple[_Change, ...]) -> bool:
        """Return whether a part of these changes is enough."""
        words = {each.words for each in extra}
        return any(words & {*found.changes} for found in self._found)

    def _largest(self, changes: tuple[_Change, ...], known: MemoryPlan | None) -> _Try | None:
        """Find the most rows at once that fit with these changes, and keep it as a proposal.

        Args:
            changes: what is changed besides the rows.
            known: a plan with these changes and all rows at once, which does not fit.

        Returns:
            The last try; None if it is plain that nothing fits, or it cannot be predicted.
        """
        rows_now = self._args.per_device_train_batch_size
        sizes = [each for each in range(rows_now, 0, -1) if self._rows % each == 0]
        if known is not None:
            sizes = [each for each in sizes[1:] if grown(known, each / rows_now) < self._room]
            if not sizes:
                return None
            return self._first_safe(changes, sizes)
        smallest = self._try(changes, sizes[-1])
        if smallest is None or not is_safe(smallest.plan):
            return smallest
        usable = self._room - margin_bytes(self._room)
        likely = [each for each in sizes[:-1] if grown(smallest.plan, each / sizes[-1]) < usable]
        is_late = time.process_time() > self._until
        found = self._first_safe(changes, likely) if likely and not is_late else None
        if found is None or not is_safe(found.plan):
            self._keep(smallest)
            return smallest
        return found

    def _first_safe(self, changes: tuple[_Change, ...], sizes: list[int]) -> _Try | None:
        tried = None
        for rows in sizes:
            if tried is not None and time.process_time() > self._until:
                return tried
            tried = self._try(changes, rows)
            if tried is None:
                return None
            if is_safe(tried.plan):
                self._keep(tried)
                return tried
        return tried

    def _try(self, changes: tuple[_Change, ...], rows: int) -> _Try | None:
        words = ", ".join((_rows(rows, self._rows // rows), *(each.words for each in changes)))
        progress.part(f"looking for what would fit: {words}")
        try:
            run = with_flags(
                self._run,
                per_device_train_batch_size=rows,
                gradient_accumulation_steps=self._rows // rows,
            )
            for change in changes:
                run = change.turn(run)
            plan = self._probe(run)
        # an error of one try that nobody foresaw must not take the plan
        except Exception:  # noqa: BLE001
            traceback.print_exc()
            return None
        if not is_safe(plan):
            self._failed[words] = plan
        return _Try(changes, rows, plan)

    def _keep(self, tried: _Try) -> None:
        source = source_of(self._run)
        rows, steps, plan = tried.rows, self._rows // tried.rows, tried.plan
        words = tuple(each.words for each in tried.changes)
        time = at_least(plan.streamed.copy_seconds_per_step) if plan.streamed else ""
        prices = [each.price.format(time=time) for each in tried.changes]
        flags = [each.flags.format(length=_half(source)) for each in tried.changes]
        if rows != self._args.per_device_train_batch_size:
            words = (_rows(rows, steps), *words)
            prices.insert(0, "the same training in smaller steps")
            flags.insert(
                0, f"--per_device_train_batch_size {rows} --gradient_accumulation_steps {steps}"
            )
        is_half = any(each.words == _HALF for each in tried.changes)
        self._found.append(
            Proposal(
                changes=words,
                price="; ".join(prices),
                flags=" ".join(flags),
                micro_batch=rows,
                accumulation_steps=steps,
                sequence_length=_half(source) if is_half else source.sequence_length,
                reserved_peak_bytes=plan.reserved_peak_bytes,
                nvidia_smi_peak_bytes=plan.nvidia_smi_peak_bytes,
                margin_bytes=plan.margin_bytes or 0,
                host_ram_bytes_per_node=plan.host_ram_bytes_per_node,
            )
        )


def _rows(rows: int, steps: int) -> str:
    return f"{rows} row{'s' if rows > 1 else ''} x {steps}"


def _half(source: ConfigSource) -> int:
    return max(1, source.sequence_length // 2)


def _least(plan: MemoryPlan, changes: tuple[_Change, ...]) -> int:
    """Return the least that a run needs with these changes; 0 if that is unknown."""
    if not all(each.frees for each in changes):
        return 0
    left = dict(plan.breakdown)
    for change in changes:
        for category, fraction in change.frees.items():
            left[category] = int(left.get(category, 0) * (1 - fraction))
    return sum(left.values()) + plan.context_bytes


def _flag(words: str, price: str, frees: dict[Category, float], **flags: object) -> _Change:
    return _Change(words, price, as_flags(flags), lambda run: with_flags(run, **flags), frees)


def _file(words: str, price: str, name: str) -> _Change:
    path = str(configs.path(name))
    return _Change(
        words,
        price,
        f"--accelerate-config {path}",
        lambda run: replace(run, launch_file=path),
        {},
    )


def _eval_rows(rows: int) -> _Change:
    words = f"{rows} row{'s' if rows > 1 else ''} at once in the evaluation"
    return _flag(words, "the same metrics in more batches", {}, per_device_eval_batch_size=rows)


def _accumulation(steps: int) -> _Change:
    words = f"outputs to main memory after {steps} batch{'es' if steps > 1 else ''}"
    return _flag(words, "outputs wait in main memory", {}, eval_accumulation_steps=steps)


_CHECKPOINTING = _flag(
    "checkpointing",
    "each forward is computed twice, about a third more time",
    {"activations": 1.0},
    gradient_checkpointing=True,
)
_HALF = "half the length"


def _changes(run: PlanRequest, args: HfArguments, plan: MemoryPlan) -> list[_Change]:
    """Return what can be changed in this run, the least costly first."""
    source = source_of(run)
    found: list[_Change] = []
    of_batch: dict[Category, float] = {"activations": 1.0, "logits and loss": 1.0}
    if text_of(args.optim) == "adamw_torch" and plan.moment == "optimizer step":
        price = "the same optimizer in one kernel"
        foreach: dict[Category, float] = {"activations": 1.0}
        found.append(_flag("fused optimizer", price, foreach, optim="adamw_torch_fused"))
    found.append(
        _flag("fused loss", "needs liger-kernel", of_batch, use_liger_kernel=True),
    )
    if "8bit" not in text_of(args.optim):
        price = "optimizer states in 8 bits, needs bitsandbytes"
        states: dict[Category, float] = {"optimizer states": 0.75}
        found.append(_flag("8-bit optimizer", price, states, optim="adamw_bnb_8bit"))
    if source.sequence_length > 1:
        price = f"rows are cut at {_half(source)} tokens"
        found.append(_Change(_HALF, price, "--seq-length {length}", half_as_long, of_batch))
    if run.launch_file is None and not args.deepspeed and not args.fsdp:
        if run.num_gpus > 1:
            spread = "more traffic between the cards"
            found.append(_file("ZeRO-3", spread, "zero3"))
            found.append(
                _file(
                    "ZeRO-3 with offload",
                    "states in main memory, slower steps",
                    "zero3_offload_all",
                )
            )
        elif source.peft is None:
            price = "states and weights in main memory, slower steps"
            found.append(_file("offload", price, "one_gpu_7b_offload"))
    return [*found[:2], *_adapters(run, args, of_batch), *found[2:]]


def _adapters(
    run: PlanRequest, args: HfArguments, of_batch: dict[Category, float]
) -> list[_Change]:
    """Return the ways to train an adapter: on the base as it is, streamed, or in 4 bits."""
    source, found = source_of(run), []
    is_alone = run.launch_file is None and not args.deepspeed and not args.fsdp
    if source.peft is not None and run.resident_layers is None and is_alone:
        price = "the same training; the base comes over the bus, {time}"
        most: dict[Category, float] = {"frozen weights": 1.0}
        found.append(_Change("base streamed", price, STREAM, with_base_streamed, most))
    states: dict[Category, float] = {**of_batch, "gradients": 1.0, "optimizer states": 1.0}
    if source.peft is None:
        price = "trains an adapter and not the weights"
        found.append(_Change("LoRA", price, LORA, with_adapter, states))
    is_whole = source.quantisation is None and "quantization_config" not in source.config
    if not is_whole and source.peft is not None and source.prepares_kbit and source.trainer is None:
        price = "what is not quantised computes in 16 bits, the norms too"
        halves: dict[Category, float] = {**of_batch, "frozen weights": 0.5}
        found.insert(
            0, _Change("no preparation by PEFT", price, NOT_PREPARED, not_prepared, halves)
        )
    if is_whole and is_alone:
        price = "the base is rounded to 4 bits, needs bitsandbytes"
        words, flags = "base in 4 bits", IN_4_BITS
        if source.peft is None:
            price = f"trains an adapter and not the weights; {price}"
            words, flags = "QLoRA", f"{LORA} {flags}"
        frees: dict[Category, float] = {**states, "weights": 0.75, "frozen weights": 0.75}
        found.append(_Change(words, price, flags, with_base_in_4_bits, frees))
    return found
