"""Read the strategy that runs in this process: wrapper, ranks, where each part lives."""

import os
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import Any

from accelerate.state import AcceleratorState
from torch import nn

from trainer_plugins.checkpointing import is_checkpointing
from trainer_plugins.hf_trainer import HfArguments
from trainer_plugins.strategy import Strategy
from trainer_plugins.streaming.stream import Stream, stream_of

# By name, because some builds of torch lack them, and DeepSpeed and accelerate subclass them.
_FAMILIES = {
    "DeepSpeedEngine": "DeepSpeed",
    "FSDPModule": "FSDP",
    "FullyShardedDataParallel": "FSDP",
    "DistributedDataParallel": "DDP",
    "DataParallel": "DataParallel",
}


def strategy_of(wrapper: nn.Module, optimizer: object, args: HfArguments) -> Strategy:
    """Read the strategy of a prepared training from the objects that do the work."""
    wrapper = getattr(wrapper, "_orig_mod", wrapper)  # torch.compile
    optimizer = getattr(optimizer, "optimizer", optimizer)
    stream = stream_of(wrapper) or stream_of(getattr(wrapper, "module", wrapper))
    numel, partitioned, homes = _parameters(wrapper, stream)
    # set by torchrun, and by DeepSpeed's launcher
    machines = os.environ.get("GROUP_WORLD_SIZE") or os.environ.get("CROSS_SIZE") or ""
    return Strategy(
        distributed_type=AcceleratorState().distributed_type.value,
        wrapped_class=type(wrapper).__name__,
        family="unknown" if args.device.type == "xla" else _family(wrapper),
        world_size=args.world_size,
        num_machines=int(machines) if machines.isdigit() else None,
        device=args.device.type,
        num_params=numel,
        num_partitioned=partitioned,
        zero_stage=_zero_stage(wrapper, optimizer),
        offload=_zero_offload(optimizer)
        | _fsdp_offload(wrapper)
        | ({"streamed base": "cpu"} if stream else {}),
        homes=homes,
        optimizer_class=_optimizer_class(optimizer),
        master_dtype=_master_dtype(optimizer),
        is_checkpointing=is_checkpointing(wrapper),
    )


def _names(obj: object) -> set[str]:
    return {cls.__name__ for cls in type(obj).__mro__}


def _family(wrapper: nn.Module) -> str:
    names = _names(wrapper)
    return next((family for name, family in _FAMILIES.items() if name in names), "nothing")


def _zero_stage(wrapper: Any, optimizer: Any) -> int | None:
    """Return the optimizer's ZeRO stage, from the module of DeepSpeed's class."""
    homes = {cls.__module__ for cls in type(optimizer).__mro__}
    if any(home.endswith("zero.stage3") for home in homes):
        return 3
    if any(home.endswith("zero.stage_1_and_2") for home in homes):
        return 2 if optimizer.partition_gradients else 1
    # BF16_Optimizer is stage 1, without ZeRO in its name; stage 0 keeps the optimizer unchanged.
    return int(wrapper.zero_optimization_stage()) if _family(wrapper) == "DeepSpeed" else None


def _parameters(wrapper: nn.Module, stream: Stream | None) -> tuple[int, int, dict[str, int]]:
    """Count elements of the whole model, of its sharded parameters, and of this rank's by home."""
    whole = partitioned = 0
    homes: Counter[str] = Counter()
    # FSDP 1 exposes views of its flat parameters, which are empty on some ranks.
    flat = [handle.flat_param for handle in _flat_handles(wrapper)]
    parameters: Iterable[Any] = flat or wrapper.parameters()
    for p in parameters:
        divided, where = False, p.device.type
        numel = here = p.numel()
        if (shard := getattr(p, "ds_tensor", None)) is not None:  # ZeRO-3
            numel, divided, here = p.ds_numel, not p.ds_persist, shard.ds_numel
            where = "nvme" if shard.final_location == "nvme" else shard.device.type
        elif hasattr(p, "placements"):  # a DTensor: FSDP2, tensor parallel
            local = p.to_local()
            divided, here, where = local.numel() < numel, local.numel(), local.device.type
        # A flat parameter of FSDP 1.
        elif (size := getattr(p, "_unpadded_unsharded_size", None)) is not None:
            numel = size.numel()
            divided = here < numel
        # Two weights per byte; counted as peft and transformers do.
        elif type(p).__name__ == "Params4bit":
            numel = here = numel * 2 * p.element_size()
        if stream is not None:
            where = stream.get_copy(p).device.type
        whole += numel
        partitioned += numel if divided else 0
        homes[where] += here
    return whole, partitioned, dict(homes)


def _flat_handles(wrapper: nn.Module) -> list[Any]:
    if "FullyShardedDataParallel" not in _names(wrapper):
        return []
    handles = [getattr(module, "_handle", None) for module in wrapper.modules()]
    return [handle for handle in handles if handle is not None]


def _zero_offload(optimizer: Any) -> dict[str, str]:
    if getattr(optimizer, "cpu_offload", False):  # stages 1 and 2 only know main memory
        return {"optimizer": "cpu"}
    found = {}
    if getattr(optimizer, "offload_optimizer", False):
        found["optimizer"] = "nvme" if optimizer.swap_optimizer else "cpu"
    if getattr(optimizer, "offload_param", False):
        found["param"] = "nvme" if optimizer.params_in_nvme_and_cpu else "cpu"
    return found


def _fsdp_offload(wrapper: nn.Module) -> dict[str, str]:
    if any(getattr(handle, "_offload_params", False) for handle in _flat_handles(wrapper)):
        return {"fsdp": "cpu"}
    fsdp2: list[Any] = [module for module in wrapper.modules() if "FSDPModule" in _names(module)]
    for module in fsdp2:
        state = module._get_fsdp_state()
        # In torch 2.13 a module has several groups, and its property for a single one then raises.
        several = getattr(state, "_fsdp_param_groups", None)
        for group in several or [getattr(state, "_fsdp_param_group", None)]:
            if group is not None and any(each.offload_to_cpu for each in group.fsdp_params):
                return {"fsdp": "cpu"}
    return {}


def _optimizer_class(optimizer: object) -> str | None:
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    return None if optimizer is None else type(optimizer).__name__


def _master_dtype(optimizer: object) -> str | None:
    """Return the dtype that the optimizer updates: of DeepSpeed's copies, else of the weights."""
    names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups")
    copies = [getattr(optimizer, name, None) or () for name in names]
    weights = [group["params"] for group in getattr(optimizer, "param_groups", None) or ()]
    for tensor in chain(*copies, *weights):
        return str(tensor.dtype).removeprefix("torch.")
    return None
