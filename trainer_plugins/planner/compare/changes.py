"""Say what could be changed in a run that does not fit, besides its rows."""

from collections.abc import Iterator

from trainer_plugins import advice, checkpointing
from trainer_plugins.hf_trainer import HfArguments
from trainer_plugins.planner.compare import switches
from trainer_plugins.planner.compare.switches import (
    Switch,
    can_offload_activations,
    launched_by,
    source_of,
)
from trainer_plugins.planner.kind import text_of
from trainer_plugins.planner.plan import Category, MemoryPlan
from trainer_plugins.planner.request import PlanRequest
from trainer_plugins.planner.tried import is_transformers_4, margin_bytes

_SPARE_SHARE = 0.05  # what is left free of a card besides the planner's margin
_SHARDED: tuple[Category, ...] = ("weights", "frozen weights", "gradients", "optimizer states")


def possible_changes(run: PlanRequest, args: HfArguments, plan: MemoryPlan) -> list[Switch]:
    """Return what can be changed in this run."""
    source, optimizer = source_of(run), text_of(args.optim)
    found = [switches.FUSED_LOSS] if plan.breakdown.get("logits and loss") else []
    if source.dtype is None and plan.planned["dtype"].startswith("float32") and not args.fp16:
        is_frozen = args.bf16 and source.peft is not None
        found.insert(0, switches.FROZEN_IN_BF16 if is_frozen else switches.WEIGHTS_IN_BF16)
    if plan.planned["checkpointing"] == "off":
        found.append(switches.CHECKPOINTING)
    offloads = "offload" in checkpointing.options(args)
    if can_offload_activations(source.trainer) and not offloads:
        found.append(switches.OFFLOADED_ACTIVATIONS)
    if optimizer == "adamw_torch" and plan.moment == "optimizer step":
        found.append(switches.FUSED_OPTIMIZER)
    if plan.breakdown.get("vLLM"):
        found += _engine(args, plan)
    if "8bit" not in optimizer:
        found.append(switches.EIGHT_BIT_OPTIMIZER)
    if source.sequence_length > 1:
        found.append(switches.HALF_LENGTH)
    strategy = plan.planned["strategy"]
    if strategy.startswith("FSDP"):  # fewer rows at once are more micro-batches
        found.append(switches.REDUCED_EACH_TIME)
    return [*found, *_launches(run, args, strategy), *_adapters(run, args)]


def _engine(args: HfArguments, plan: MemoryPlan) -> Iterator[Switch]:
    """Yield a smaller share of the card for vLLM, and its sleep while the training computes."""
    now, capacity = float(getattr(args, "vllm_gpu_memory_utilization", 0)), plan.capacity_bytes
    if now and capacity:
        spare = plan.nvidia_smi_peak_bytes + margin_bytes(capacity) - capacity
        share = advice.smaller_share(now, max(0, spare) / capacity + _SPARE_SHARE)
        yield switches.smaller_engine_share(share, 1 - share / now)
    if not getattr(args, "vllm_enable_sleep_mode", False):
        yield switches.SLEEPING_ENGINE


def _launches(run: PlanRequest, args: HfArguments, strategy: str) -> Iterator[Switch]:
    """Yield the launch files that divide more among the cards, or that use main memory."""
    if args.deepspeed or args.fsdp:
        return
    offloads = "states and weights in main memory, much slower steps"
    if run.num_gpus == 1:
        if run.launch_file is None and source_of(run).peft is None:
            yield launched_by("offload", offloads, "one_gpu_7b_offload", _SHARDED, 0.95)
        return
    traffic, share = "more traffic between the cards", 1 - 1 / run.num_gpus
    if strategy == "DDP":
        yield launched_by("FSDP2", traffic, "fsdp2", _SHARDED, share)
        yield launched_by("ZeRO-3", traffic, "zero3", _SHARDED, share)
    elif strategy in ("DeepSpeed ZeRO-1", "DeepSpeed ZeRO-2"):
        yield launched_by("ZeRO-3", traffic, "zero3", _SHARDED[:2], share)
    if strategy == "FSDP2":
        words, file = "FSDP2 with offload", "fsdp2_offload"
    else:
        words, file = "ZeRO-3 with offload", "zero3_offload_all"
    yield launched_by(words, offloads, file, _SHARDED, 0.95)


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
    # transformers 5 stacks experts, and bitsandbytes leaves them in 16 bits (bitsandbytes#1849)
    is_spared = bool(switches.experts_in(source.config)) and not is_transformers_4()
    if not is_quantised and not is_spared and _is_alone(run, args):
        found.append(switches.BASE_IN_4_BITS if has_adapter else switches.QLORA)
    return found
