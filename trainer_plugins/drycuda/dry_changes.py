"""Change a dry run: a command by its TrainingArguments and variables, or a config."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import yaml

from trainer_plugins import advice
from trainer_plugins.advice.entry import flags_in
from trainer_plugins.drycuda.dry_run import DryRun
from trainer_plugins.planner.cards import Card
from trainer_plugins.planner.compare import switches
from trainer_plugins.planner.compare.switches import Switch, make_launch_switch, source_of
from trainer_plugins.planner.plan import Category, MemoryPlan, Moment, PlanError, Proposal
from trainer_plugins.planner.request import PlanRequest
from trainer_plugins.planner.tried import is_transformers_4, margin_bytes

_SPARE_SHARE = 0.05  # the part of a card left free besides the planner's margin
_OF_ROWS: tuple[Category, ...] = ("activations", "logits and loss")
_SHARDED: tuple[Category, ...] = ("weights", "frozen weights", "gradients", "optimizer states")

WAYS: tuple[tuple[Switch, ...], ...] = (
    (),
    (switches.FUSED_LOSS,),
    (switches.CHECKPOINTING,),
    (switches.FUSED_LOSS, switches.CHECKPOINTING),
    (switches.OFFLOADED_ACTIVATIONS,),
    (switches.FUSED_LOSS, switches.OFFLOADED_ACTIVATIONS),
    (switches.CHECKPOINTING, switches.EIGHT_BIT_OPTIMIZER),
    (switches.FUSED_LOSS, switches.CHECKPOINTING, switches.EIGHT_BIT_OPTIMIZER),
)
"""The changes to try besides fewer rows: first those that keep the training, then faster ones."""


class Fitted(NamedTuple):
    """Holds arguments with which a command fits."""

    proposal: Proposal
    # some of the TrainingArguments with which the command was planned
    planned: Mapping[str, object]
    changed: Mapping[str, object]  # the TrainingArguments to change
    rows_at_once: int = 0  # how many of the longest rows survival computes at once; 0 if all fit
    # whether to vouch to survival that the loss is a sum or a mean, as its code says
    vouches: bool = False


def effort(way: tuple[Switch, ...]) -> int:
    """Rank a combination by its effect; a streamed base comes late, since it needs this package."""
    return sum(each.changes_result for each in way) + 2 * (switches.STREAMED_BASE in way)


def is_usual(arguments: Mapping[str, Any]) -> bool:
    """Return whether the accelerator settings are accelerate's defaults."""
    from transformers.trainer_pt_utils import AcceleratorConfig

    # One of them is removed while the arguments are built.
    return bool(arguments["accelerator_config"].items() <= AcceleratorConfig().to_dict().items())


def run_with(run: DryRun, changed: Mapping[str, object]) -> DryRun:
    """Return a run with other TrainingArguments."""
    return replace(run, changed={**run.changed, **changed}, snapshot=None, foretells=True)


def turn(run: DryRun, change: Switch) -> DryRun:
    """Apply a switch to a run: to a request in full, to a command by its arguments."""
    if (request := run.of_config) is not None:
        return replace(run, request=change.turn(request), snapshot=None)
    if change == switches.ADAPTER_IN_SCRIPT:
        return run_with(run, {"peft_config": switches.LORA})
    if flags := flags_in(change.flags):
        # YAML parses booleans, numbers, JSON and words as TrainingArguments hold them
        return run_with(run, {name: yaml.safe_load(text) for name, text in flags.items()})
    variable, is_one, value = change.flags.partition("=")
    if is_one and variable.isupper():
        return replace(run, environment={**run.environment, variable: value}, snapshot=None)
    raise PlanError("your command sets this itself: change it there")


def possible_changes(
    run: PlanRequest, arguments: Mapping[str, Any], plan: MemoryPlan
) -> Iterator[Switch]:
    """Yield the possible changes of this run, those that keep the training first."""
    source = source_of(run)
    if source.dtype is None and plan.planned["dtype"].startswith("float32"):
        if arguments["bf16"] and source.peft is not None:
            yield switches.FROZEN_IN_BF16
        elif not arguments["fp16"]:
            yield switches.WEIGHTS_IN_BF16
    if plan.breakdown.get("vLLM"):
        yield from _engine(arguments, plan)
    is_alone = run.launch_file is None and not arguments["deepspeed"] and not arguments["fsdp"]
    yield from _adapters(run, is_alone=is_alone)
    if not arguments["deepspeed"] and not arguments["fsdp"]:
        yield from _launches(run, plan.planned["strategy"])


def _engine(arguments: Mapping[str, Any], plan: MemoryPlan) -> Iterator[Switch]:
    now, capacity = float(arguments.get("vllm_gpu_memory_utilization", 0)), plan.capacity_bytes
    if now and capacity:
        spare = plan.needed_bytes + margin_bytes(capacity) - capacity
        share = advice.smaller_share(now, max(0, spare) / capacity + _SPARE_SHARE)
        yield switches.smaller_engine_share(share, 1 - share / now)
    if not arguments.get("vllm_enable_sleep_mode"):
        yield switches.SLEEPING_ENGINE


def _launches(run: PlanRequest, strategy: str) -> Iterator[Switch]:
    """Yield launch files that shard more over the cards, or that use main memory."""
    offloads = "states and weights in main memory, much slower steps"
    if run.num_gpus <= 1:
        if run.launch_file is None and source_of(run).peft is None:
            yield make_launch_switch("offload", offloads, "one_gpu_7b_offload", _SHARDED, 0.95)
        return
    traffic, share = "more traffic between the cards", 1 - 1 / run.num_gpus
    if strategy == "DDP":
        yield make_launch_switch("FSDP2", traffic, "fsdp2", _SHARDED, share)
        yield make_launch_switch("ZeRO-3", traffic, "zero3", _SHARDED, share)
    elif strategy in ("DeepSpeed ZeRO-1", "DeepSpeed ZeRO-2"):
        yield make_launch_switch("ZeRO-3", traffic, "zero3", _SHARDED[:2], share)
    if strategy == "FSDP2":
        words, file = "FSDP2 with offload", "fsdp2_offload"
    else:
        words, file = "ZeRO-3 with offload", "zero3_offload_all"
    yield make_launch_switch(words, offloads, file, _SHARDED, 0.95)


def _adapters(run: PlanRequest, *, is_alone: bool) -> Iterator[Switch]:
    """Yield the ways to train an adapter: on the base as it is, streamed, or in 4 bits."""
    source, has_adapter = source_of(run), source_of(run).peft is not None
    is_quantised = source.quantisation is not None or "quantization_config" in source.config
    if has_adapter and is_quantised and source.prepares_kbit and source.trainer is None:
        yield switches.UNPREPARED
    if has_adapter and run.resident_layers is None and is_alone:
        yield switches.STREAMED_BASE
    if not has_adapter:
        yield switches.ADAPTER
    # transformers 5 stacks experts, which bitsandbytes leaves in 16 bits (bitsandbytes#1849).
    is_spared = bool(switches.experts_in(source.config)) and not is_transformers_4()
    if not is_quantised and not is_spared and is_alone:
        yield switches.BASE_IN_4_BITS if has_adapter else switches.QLORA


# Bounds from one plan for others, to skip hopeless runs.


def short_moments(plan: MemoryPlan, card: Card) -> frozenset[Moment]:
    """Return the moments of a plan at which it exceeds a card."""
    margin = margin_bytes(card.capacity_bytes, "quantised" in plan.planned)
    usable = card.capacity_bytes - card.context_bytes - margin
    return frozenset(name for name, peak in plan.moments.items() if peak.allocated_bytes > usable)


def least_bytes(plan: MemoryPlan, freed: Collection[Category], part: float) -> int:
    """Return the smallest card that a run may need with part of its rows, without some categories.

    The memory of rows shrinks at most in proportion. The peak may move to another, higher moment.
    """
    held = plan.breakdown
    gone = sum(num_bytes for name, num_bytes in held.items() if name in freed)
    of_rows = sum(held.get(name, 0) for name in _OF_ROWS if name not in freed)
    least = plan.allocated_peak_bytes + plan.context_bytes - gone - int((1 - part) * of_rows)
    return least + margin_bytes(least, "quantised" in plan.planned)


def most_rows_by(plan: MemoryPlan, rows: int, spare_bytes: int) -> int:
    """Return how many rows at once may fit if each takes as much as one row of this plan."""
    of_a_row = sum(plan.breakdown.get(name, 0) for name in _OF_ROWS) / rows
    return rows + int(spare_bytes / of_a_row) if of_a_row else 1 << 30
