"""Compute the main memory of a launch file, and compare it with the machine's.

All parameters are trained with AdamW, and weights are loaded in 16 bits.
tests/launch/host_memory.toml compares it with the planner, which runs the code named here.
"""

from collections.abc import Iterator
from typing import NamedTuple

from trainer_plugins import advice
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.launch.lint.document import Document
from trainer_plugins.launch.main_memory import HostLimits, HostNeed
from trainer_plugins.units import GIB, count_in_words, size

_NEARLY = 0.8
_HALF, _FULL = 2.0, 4.0  # bytes of a 16-bit and of a 32-bit number
_SUB_GROUP = 1_000_000_000  # deepspeed/runtime/zero/config.py, sub_group_size
# deepspeed/runtime/zero/offload_config.py: numbers of buffers, and elements
_STATE_BUFFERS, _PARAM_BUFFERS, _PARAM_BUFFER, _IN_CPU = 4, 5, 100_000_000, 1_000_000_000
_REMEDY = (
    "Spread it over more machines; keep bf16 states (the config one_gpu_7b_offload); set pin_memory"
    " to false, since pinned tensors take powers of two; put the optimizer on NVMe"
    " (zero3_offload_nvme); or train adapters"
)
_FOR_FSDP2 = (
    "FSDP2 begins with float32 copies of all weights on each rank: use ZeRO-3 (zero3), or bf16"
    " weights without --bf16, whose small updates are rounded away; or spread it over more machines"
)
_FOR_NVME = (
    'Write "sub_group_size": 1e8, "max_in_cpu": 0, and a "buffer_size" of the largest weight:'
    " DeepSpeed keeps several of each in main memory for the drive"
)
# The ratio of pinned blocks to their tensors, for weights one by one: 1.1 to 1.33 in the models of
# host_memory.toml, depending on the width of their layers.
_ROUNDED = 1.3


class _Part(NamedTuple):
    num_bytes: float  # if it is pinned, of its blocks
    is_pinned: bool = False


def memory_findings(
    document: Document, num_params: float | None, num_ranks: int | None, host: HostLimits
) -> Iterator[Finding]:
    """Judge the main memory of a machine from a launch's parameters and ranks."""
    if num_params is None:
        return
    num_ranks = num_ranks or document.count("num_processes") or 1
    need = host_need(document, num_params, num_ranks)
    shortage = host.shortage(need)
    least = host_need(document, num_params, num_ranks, is_mapped=True)
    if least.tensor_bytes < need.tensor_bytes and host.shortage(least) is None:
        if shortage is not None:
            yield _report_shared_load(need, shortage)
        return
    is_near = host.total_bytes is not None and need.total_bytes > _NEARLY * host.total_bytes
    if shortage is None and not is_near:
        return
    parts = [f"{need.tensor_bytes / num_params:.1f} B for each of {num_params:.3g} parameters"]
    if need.pinned_bytes:
        parts.append(f"{size(need.pinned_bytes)} of it pinned")
    if need.save_bytes:
        parts.append(f"{size(need.save_bytes)} that a save gathers")
    parts.append(f"and {size(need.process_bytes)} for Python and its libraries")
    of_machine = f"{count_in_words(need.num_ranks, 'rank')} on a machine"
    nearly = f"each machine needs {size(need.total_bytes)} of its {size(host.total_bytes or 0)}"
    yield Finding(
        code="config-host-memory",
        severity=Severity.WARNING if shortage is None else Severity.ERROR,
        summary=shortage or f"{nearly} of main memory",
        evidence=f"{', '.join(parts)}, with {of_machine}",
        remedy=_remedy(document),
        amount=need.total_bytes / GIB,
    )


def _remedy(document: Document) -> str:
    if "nvme" in document.offload_devices.values():
        return _FOR_NVME
    is_second = document.get_fsdp("version") == 2
    return _FOR_FSDP2 if is_second and not document.offload_devices else _REMEDY


def _report_shared_load(need: HostNeed, shortage: str) -> Finding:
    """Warn that loading takes too much if the ranks do not share the weights they read."""
    return Finding.warning(
        code="config-host-memory",
        summary=f"while loading, {shortage}",
        evidence=f"{need.num_ranks} ranks load all weights each if transformers 5 stacks experts,"
        " casts or decodes weights; weights used as stored in the file are loaded once",
        remedy="`trainer-plugins plan` shows whether it does; or use stage 3, which"
        f" {advice.READ_BY_ONE_RANK.effect}",
        amount=need.total_bytes / GIB,
    )


def host_need(
    document: Document, num_params: float, num_ranks: int, *, is_mapped: bool = False
) -> HostNeed:
    """Compute the main memory of one machine's ranks; `num_ranks` counts all machines.

    Weights mapped from a file exist once for all ranks.
    """
    num_local = max(1, num_ranks // (document.count("num_machines") or 1))
    share = num_params / num_ranks
    is_whole = False
    if document.get_accelerate("distributed_type") == "FSDP":
        start, parts = _fsdp(document, num_params, share)
    elif document.zero_stage == 3:
        # deepspeed/runtime/zero/utils.py, defragment, joins weights on the card into one buffer
        start = 0.0 if "param" in document.offload_devices else share * _HALF
        parts = [*_zero_3(document, share)]
    else:
        # each rank loads the whole model, and moves it to its card
        start, parts, is_whole = num_params * _HALF, [*_zero_2(document, share)], True
    # deepspeed/runtime/engine.py, `_zero3_consolidated_16bit_state_dict`, in the first rank
    key = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    gathers = document.zero_stage == 3 and document.get_deepspeed(key) is True
    steady = num_local * sum(each.num_bytes for each in parts)
    pinned = num_local * sum(each.num_bytes for each in parts if each.is_pinned)
    return HostNeed(
        tensor_bytes=int(max(start if is_mapped and is_whole else num_local * start, steady)),
        pinned_bytes=int(pinned),
        num_ranks=num_local,
        save_bytes=int(num_params * _HALF) if gathers else 0,
    )


def _fsdp(document: Document, num_params: float, share: float) -> tuple[float, list[_Part]]:
    """Count FSDP: loading, in which each rank has all weights, and the rest."""
    # accelerate/utils/fsdp_utils.py, fsdp2_prepare_model, upcasts, then takes a state dict that
    # lives until the shards of all ranks exist. FSDP1 upcasts shards.
    is_second = document.get_fsdp("version") == 2
    start = num_params * (_FULL if is_second else _HALF)
    if "fsdp" not in document.offload_devices:
        return start, []
    weights = gradients = _Part(share * _FULL * _ROUNDED, is_pinned=True)
    states = _Part(2 * share * _FULL)
    return start + share * _FULL + weights.num_bytes, [weights, gradients, states]


def _zero_3(document: Document, share: float) -> Iterator[_Part]:
    # deepspeed/runtime/zero/stage3.py: `_create_param_groups_fp16_flat_cpu_memory`,
    # `_create_fp32_partitions`, `initialize_optimizer_states`, `_setup_for_real_optimizer`
    zero, offloads = "zero_optimization", document.offload_devices
    has_bf16_master = document.get_deepspeed("bf16.bf16_master_weights_and_grads") is True
    has_bf16_states = document.get_deepspeed("bf16.bf16_optimizer_states") is True
    master = _HALF if has_bf16_master else _FULL
    state = _HALF if has_bf16_states else _FULL
    is_pinned = document.get_offload("optimizer", "pin_memory") is not False
    group = _number(document, f"{zero}.sub_group_size", _SUB_GROUP) or _SUB_GROUP
    if "optimizer" in offloads:
        yield _part(share * _HALF, is_pinned)  # gradients
    if offloads.get("optimizer") == "cpu":
        yield _Part(share * (master + 2 * state))
        for _ in range(int(share // group)):  # gradients for the optimizer, group by group
            yield _part(group * master, is_pinned)
        yield _part(share % group * master, is_pinned)
    if offloads.get("optimizer") == "nvme":  # runtime/swap_tensor/optimizer_utils.py
        count = _number(document, f"{zero}.offload_optimizer.buffer_count", _STATE_BUFFERS)
        yield _Part(count * min(share, group) * master)
    if offloads.get("param") == "nvme":  # runtime/swap_tensor/partitioned_param_swapper.py
        count = _number(document, f"{zero}.offload_param.buffer_count", _PARAM_BUFFERS)
        buffer = _number(document, f"{zero}.offload_param.buffer_size", _PARAM_BUFFER)
        yield _Part(count * buffer * _HALF)
        in_cpu = _number(document, f"{zero}.offload_param.max_in_cpu", _IN_CPU)
        yield _part(min(share, in_cpu) * _HALF, is_pinned=True)
    if offloads.get("param") == "cpu":
        yield _part(share * _HALF, is_pinned=True)
        if document.get_offload("param", "pin_memory") is not False:
            # partition_parameters.py, _partition_param, before they move to the flat buffer
            yield _Part(share * _HALF * _ROUNDED, is_pinned=True)


def _zero_2(document: Document, share: float) -> Iterator[_Part]:
    # deepspeed/runtime/zero/stage_1_and_2.py: `__init__`, `initialize_optimizer_states`
    if document.offload_devices.get("optimizer") != "cpu":
        return
    pins = document.get_offload("optimizer", "pin_memory") is not False
    for width in (_FULL, _HALF, _FULL):  # weights, their 16-bit copy, gradients
        yield _part(share * width, pins)
    yield _Part(2 * share * _FULL)


def _number(document: Document, key: str, default: float) -> float:
    found = document.get_deepspeed(key)
    return found if isinstance(found, (int, float)) and found >= 0 else default


def _part(num_bytes: float, is_pinned: bool) -> _Part:
    """Count a part; torch pins a power of two for each tensor (CachingHostAllocator.h)."""
    power_of_two = 1 << max(0, int(num_bytes) - 1).bit_length()
    return _Part(power_of_two if is_pinned else num_bytes, is_pinned)
