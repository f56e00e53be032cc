"""Ways: the changes that `plan` and `exec --fit` try, and their order."""

from collections.abc import Iterator, Mapping
from typing import Any

from trainer_plugins import advice
from trainer_plugins.planner.compare import switches
from trainer_plugins.planner.compare.switches import Switch, make_launch_switch, source_of
from trainer_plugins.planner.plan import Category, MemoryPlan
from trainer_plugins.planner.request import PlanRequest
from trainer_plugins.planner.tried import is_transformers_4, margin_bytes

_SPARE_SHARE = 0.05  # the part of a card left free besides the planner's margin
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


def effort(way: tuple[Switch, ...]) -> int:
    """Rank a combination by its effect; a streamed base comes late, since it needs this package."""
    return sum(each.changes_result for each in way) + 2 * (switches.STREAMED_BASE in way)


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
