"""Let DeepSpeed's own engine run on tensors without bytes. Imports torch and DeepSpeed.

Replaced is only what a machine without a card, or a rank without peers, cannot do. Each patch has a
function that names the place in DeepSpeed 0.19.8 that needs it. The engine's own code decides which
parameters are gathered, when they are released, and how large each buffer is.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias
from unittest.mock import patch

import torch

from trainer_plugins.planner.plan import Category, NotPredicted
from trainer_plugins.planner.sharded import zero_views
from trainer_plugins.planner.tracing.trace import Tracker

_Views: TypeAlias = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def engine_without_bytes(tracker: Tracker) -> Iterator[list[Any]]:
    """Patch DeepSpeed while an engine is made and runs. Yields the engines that are made."""
    engines: list[Any] = []
    with contextlib.ExitStack() as stack:
        _state_ends(stack)
        _ranks_agree(stack)
        _gradients_are_finite(stack)
        _streams(stack)
        _ops_are_not_built(stack)
        _buffers_are_known(stack, tracker)
        _engines_are_watched(stack, tracker, engines)
        yield engines


def _state_ends(stack: contextlib.ExitStack) -> None:
    """Restore what DeepSpeed keeps for the process: the next prediction is another run.

    DeepSpeed keeps groups, counters and a replaced `linear`. transformers keeps the config, which
    tells it that DeepSpeed is used at all.
    """
    import deepspeed.comm.comm as comm
    from deepspeed.runtime.zero import parameter_offload, partition_parameters
    from deepspeed.utils import groups
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    for owner in (
        comm,
        groups,
        partition_parameters,
        partition_parameters.Init,
        torch.nn.functional,
    ):
        stack.callback(
            _restore,
            owner,
            {name: value for name, value in vars(owner).items() if _is_state(name, value)},
        )
    stack.callback(parameter_offload.FWD_MODULE_STACK.clear)
    stack.callback(unset_hf_deepspeed_config)


def _is_state(name: str, value: object) -> bool:
    return name == "linear" or (not name.startswith("__") and not callable(value)) or value is None


def _restore(owner: object, before: dict[str, object]) -> None:
    for name, value in before.items():
        if getattr(owner, name, None) is not value:
            setattr(owner, name, value)


def _ranks_agree(stack: contextlib.ExitStack) -> None:
    """Skip the comparison of the order of modules with rank 0, which needs values.

    Stage 3 does it in partitioned_param_coordinator.py, reset_step.
    """
    from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator, stage3

    for module in (partition_parameters, partitioned_param_coordinator, stage3):
        stack.enter_context(
            patch.object(module, "assert_ints_same_as_other_ranks", lambda ints: None)
        )


def _gradients_are_finite(stack: contextlib.ExitStack) -> None:
    """Let has_overflow of both stages look at gradients, which takes memory, and find none."""
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    for module, kind in (
        (stage3, stage3.DeepSpeedZeroOptimizer_Stage3),
        (stage_1_and_2, stage_1_and_2.DeepSpeedZeroOptimizer),
    ):
        stack.enter_context(patch.object(kind, "has_overflow", _and_says_no(kind.has_overflow)))
        stack.enter_context(patch.object(module, "is_invalid_grad_norm", lambda norm: False))


def _and_says_no(has_overflow: Callable[..., object]) -> Callable[..., bool]:
    def looked(*args: object, **kwargs: object) -> bool:
        has_overflow(*args, **kwargs)
        return False

    return looked


def _streams(stack: contextlib.ExitStack) -> None:
    """Let the engine find a default stream; it gathers on its own stream.

    A freed block is free at once here, even if another stream still reads it.
    """
    first: object = torch.cuda.current_stream()
    stack.enter_context(patch.object(torch.cuda, "default_stream", lambda device=None: first))
    stack.enter_context(patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None))
    for name in ("range_push", "range_pop"):
        stack.enter_context(patch.object(torch.cuda.nvtx, name, lambda *_: 0))


class _Op:
    """Stands in for an operation of Adam in C++ or CUDA, which works in place without memory."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def _ops_are_not_built(stack: contextlib.ExitStack) -> None:
    """Do not compile the operations of Adam; the optimizers make their states in Python.

    csrc/adam: cpu_adam_impl.cpp and multi_tensor_adam.cu.
    """
    from deepspeed.ops.adam import cpu_adam, fused_adam

    for builder in (cpu_adam.CPUAdamBuilder, fused_adam.FusedAdamBuilder):
        stack.enter_context(patch.object(builder, "load", lambda *_, **__: _Op()))


def _buffers_are_known(stack: contextlib.ExitStack, tracker: Tracker) -> None:
    """Tag gathered weights, and the buckets in which gradients are reduced, as sharding buffers."""
    from deepspeed.runtime.zero import stage3
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    makers: tuple[tuple[object, str, _Views], ...] = (
        (PartitionedParameterCoordinator, "fetch_sub_module", zero_views.while_gathering),
        (stage3, "reduce_scatter_coalesced", zero_views.while_reducing),
    )
    for owner, name, views in makers:
        stack.enter_context(
            patch.object(owner, name, _making_buffers(getattr(owner, name), tracker, views))
        )
    set_up = DeepSpeedZeroOptimizer.setup_buckets

    def buckets_set_up(optimizer: Any) -> None:
        set_up(optimizer)
        buffers = [buffer for bucket in optimizer.ipg_buckets.values() for buffer in bucket.buffer]
        optimizer.storages_of_buckets = [tracker.storage_of(buffer) for buffer in buffers]

    stack.enter_context(patch.object(DeepSpeedZeroOptimizer, "setup_buckets", buckets_set_up))


def _making_buffers(
    original: Callable[..., object], tracker: Tracker, views: _Views
) -> Callable[..., object]:
    def made(*args: object, **kwargs: object) -> object:
        with tracker.as_category("sharding buffers"), views():
            return original(*args, **kwargs)

    return made


def _engines_are_watched(stack: contextlib.ExitStack, tracker: Tracker, engines: list[Any]) -> None:
    """Count what an engine makes at its start as load, and refuse an engine that skips a step.

    The figures of a skipped step would be too low.
    """
    from deepspeed import DeepSpeedEngine

    make, step = DeepSpeedEngine.__init__, DeepSpeedEngine.step
    consolidate = DeepSpeedEngine._zero3_consolidated_16bit_state_dict

    def made(engine: object, *args: object, **kwargs: object) -> None:
        with tracker.during("load"):
            make(engine, *args, **kwargs)
        engines.append(engine)

    def stepped(engine: Any, *args: object, **kwargs: object) -> object:
        _name_parts(engine, tracker)
        done = step(engine, *args, **kwargs)
        if engine.skipped_steps:
            raise NotPredicted("this DeepSpeed: its engine skips steps if tensors have no values")
        return done

    def consolidated(*args: object, **kwargs: object) -> object:
        with tracker.host.in_ranks(1):  # only rank 0 keeps what is gathered
            return consolidate(*args, **kwargs)

    stack.enter_context(patch.object(DeepSpeedEngine, "__init__", made))
    stack.enter_context(patch.object(DeepSpeedEngine, "step", stepped))
    stack.enter_context(
        patch.object(DeepSpeedEngine, "_zero3_consolidated_16bit_state_dict", consolidated)
    )


def _name_parts(engine: Any, tracker: Tracker) -> None:
    """Tag the flat buffers of the engine's optimizer, and the parts of weights.

    Weights that are not trained have no flat buffer. stage3.py and stage_1_and_2.py, `__init__`;
    partition_parameters.py.
    """
    optimizer = engine.optimizer
    for weight in engine.module.parameters():
        tracker.tag(
            [getattr(weight, "ds_tensor", None)],
            "weights" if weight.requires_grad else "frozen weights",
        )

    def of(name: str) -> list[Any]:
        value = getattr(optimizer, name, None)
        values = (
            list(value.values())
            if isinstance(value, dict)
            else value
            if isinstance(value, list)
            else [value]
        )
        return [
            each for one in values for each in (one if isinstance(one, (list, tuple)) else [one])
        ]

    for name, category in _PARTS.items():
        tracker.tag(of(name), category)
    tracker.tag(
        (getattr(bucket, "buffer", None) for bucket in of("ipg_buckets")), "sharding buffers"
    )
    for storage in of("storages_of_buckets"):  # stages 1 and 2: gradients were views into them
        if storage is not None:
            storage.category = "sharding buffers"


_PARTS: dict[str, Category] = {
    "fp16_partitioned_groups_flat": "weights",
    "bit16_groups_flat": "weights",
    "fp32_partitioned_groups_flat": "optimizer states",
    "single_partition_of_fp32_groups": "optimizer states",
    "grad_partitions_flat_buffer": "gradients",
    "averaged_gradients": "gradients",
}
