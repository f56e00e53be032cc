"""Count the main memory that a launch file needs, from the number of parameters alone.

All parameters are trained with AdamW, and weights are loaded with 16 bits. Held against the
planner, which runs the code that is named here, in tests/launch/host_memory.toml.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from trainer_plugins.allocator.pinned import block_bytes
from trainer_plugins.launch.lint.document import Document
from trainer_plugins.launch.lint.names import offload_devices, zero_stage
from trainer_plugins.launch.lint.schema import part
from trainer_plugins.launch.main_memory import HostNeed

_HALF, _FULL = 2.0, 4.0  # bytes of a number with 16 bits, and with 32
_SUB_GROUP = 1_000_000_000  # deepspeed/runtime/zero/config.py, sub_group_size
_ROUNDED = 1.3
"""What a pinned block is larger than its tensor, for the weights of a model one by one. It is 1.1
to 1.33 in the models of host_memory.toml: it depends on the width of their layers."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Holds tensors of one rank."""

    num_bytes: float
    pinned_bytes: float = 0.0
    """What they take if they are pinned, and 0 if they are not."""


def host_need(document: Document, num_params: float, num_ranks: int) -> HostNeed:
    """Count what all ranks of one machine need.

    Args:
        document: the launch file.
        num_params: parameters of the model.
        num_ranks: ranks on all machines of the file.
    """
    machines = part(document.accelerate or {}, "num_machines")
    num_local = max(1, num_ranks // machines) if isinstance(machines, int) else num_ranks
    share = num_params / num_ranks
    kind = part(document.accelerate or {}, "distributed_type")
    if kind == "FSDP":
        start, parts = _fsdp(document, num_params, share)
    elif zero_stage(document) == 3:
        start, parts = _defragmented(document, share), [*_zero_3(document, share)]
    else:
        # each rank loads the whole model, and moves it to its card
        start, parts = num_params * _HALF, [*_zero_2(document, share)]
    pinned = sum(each.pinned_bytes for each in parts)
    steady = pinned + sum(each.num_bytes for each in parts if not each.pinned_bytes)
    return HostNeed(
        tensor_bytes=int(num_local * max(start, steady)),
        pinned_bytes=int(num_local * pinned),
        num_ranks=num_local,
        save_bytes=int(_gathered(document, num_params)),
    )


def _gathered(document: Document, num_params: float) -> float:
    """Return what the first rank gathers when ZeRO-3 saves one file with 16-bit weights.

    deepspeed/runtime/engine.py, `_zero3_consolidated_16bit_state_dict`.
    """
    gathers = part(
        document.deepspeed or {}, "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    )
    return num_params * _HALF if zero_stage(document) == 3 and gathers is True else 0.0


def ranks_of(document: Document) -> int:
    """Return the ranks that a file says; 1 if it leaves that to the launch."""
    said = part(document.accelerate or {}, "num_processes")
    return said if isinstance(said, int) and said > 0 else 1


def _fsdp(document: Document, num_params: float, share: float) -> tuple[float, list[_Part]]:
    """Count FSDP: a start in which each rank has all weights with 32 bits, and what stays.

    accelerate/utils/fsdp_utils.py, fsdp2_prepare_model: it upcasts, then takes a state dict, which
    lives until the parts of all ranks are made. FSDP1 upcasts parts.
    """
    is_second = part(document.accelerate or {}, "fsdp_config.fsdp_version") == 2
    start = num_params * (_FULL if is_second else _HALF)
    if "fsdp" not in offload_devices(document):
        return start, []
    weights = _Part(share * _FULL, share * _FULL * _ROUNDED)
    start += share * _FULL + weights.pinned_bytes
    gradients, states = weights, _Part(2 * share * _FULL)
    return start, [weights, gradients, states]


def _defragmented(document: Document, share: float) -> float:
    """Return what passes through main memory while weights on the card are joined to one buffer.

    deepspeed/runtime/zero/utils.py, defragment.
    """
    return 0.0 if "param" in offload_devices(document) else share * _HALF


def _zero_3(document: Document, share: float) -> Iterator[_Part]:
    """Count what stage 3 keeps of a rank's share.

    deepspeed/runtime/zero/stage3.py: `_create_param_groups_fp16_flat_cpu_memory`,
    `_create_fp32_partitions`, `initialize_optimizer_states`, `_setup_for_real_optimizer`.
    """
    config, offloads = document.deepspeed or {}, offload_devices(document)
    master = _HALF if part(config, "bf16.bf16_master_weights_and_grads") is True else _FULL
    state = _HALF if part(config, "bf16.bf16_optimizer_states") is True else _FULL
    if "optimizer" in offloads:
        is_pinned = part(config, "zero_optimization.offload_optimizer.pin_memory") is not False
        yield _one(share * _HALF, is_pinned)  # gradients
    if offloads.get("optimizer") == "cpu":
        yield _Part(share * (master + 2 * state))
        size = part(config, "zero_optimization.sub_group_size")
        size = size if isinstance(size, (int, float)) and size > 0 else _SUB_GROUP
        for _ in range(int(share // size)):  # gradients for the optimizer, group by group
            yield _one(size * master, is_pinned)
        yield _one(share % size * master, is_pinned)
    if offloads.get("param") == "cpu":
        yield _one(share * _HALF, is_pinned=True)
        if part(config, "zero_optimization.offload_param.pin_memory") is not False:
            # partition_parameters.py, _partition_param, before they are moved to the flat buffer
            yield _Part(share * _HALF, share * _HALF * _ROUNDED)


def _zero_2(document: Document, share: float) -> Iterator[_Part]:
    """Count what an offload of stage 1 or 2 keeps of a rank's share.

    deepspeed/runtime/zero/stage_1_and_2.py: `__init__`, `initialize_optimizer_states`.
    """
    if offload_devices(document).get("optimizer") != "cpu":
        return
    pin = part(document.deepspeed or {}, "zero_optimization.offload_optimizer.pin_memory")
    for width in (_FULL, _HALF, _FULL):  # weights, their copy with 16 bits, gradients
        yield _one(share * width, pin is not False)
    yield _Part(2 * share * _FULL)


def _one(num_bytes: float, is_pinned: bool) -> _Part:
    return _Part(num_bytes, float(block_bytes(int(num_bytes))) if is_pinned else 0.0)
