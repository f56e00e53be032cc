"""Let DeepSpeed's own engine run on tensors without bytes.

Only what a machine without a card, or a rank without peers, cannot do is replaced; each patch names
the place in DeepSpeed 0.19.8 that needs it.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from trainer_plugins.patched import Patches
from trainer_plugins.planner.plan import Category, NotPredicted
from trainer_plugins.planner.tracing.trace import Tracker

_PARTS: dict[str, Category] = {
    "fp16_partitioned_groups_flat": "weights",
    "bit16_groups_flat": "weights",
    "fp32_partitioned_groups_flat": "optimizer states",
    "single_partition_of_fp32_groups": "optimizer states",
    "grad_partitions_flat_buffer": "gradients",
    "averaged_gradients": "gradients",
}  # the flat buffers of the engine's optimizer, or lists and dicts of them


def run_without_bytes(patches: Patches, tracker: Tracker) -> list[Any]:
    """Patch DeepSpeed before an engine is made. Returns a list that gets each engine."""
    engines: list[Any] = []
    _state_ends(patches)
    _init_restores_the_planners_tensor(patches)
    _ranks_agree(patches)
    _gradients_are_finite(patches)
    _streams(patches)
    _gathers_hold_what_they_send(patches)
    _ops_are_not_built(patches)
    _buffers_are_known(patches, tracker)
    _engines_are_watched(patches, tracker, engines)
    return engines


def _state_ends(patches: Patches) -> None:
    """Restore what DeepSpeed and transformers keep for the process: another run comes next."""
    import deepspeed.comm.comm as comm
    from deepspeed.runtime.zero import parameter_offload, partition_parameters
    from deepspeed.utils import groups
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    init = partition_parameters.Init
    for owner in (comm, groups, partition_parameters, init, torch.nn.functional):
        state = {name: value for name, value in vars(owner).items() if _is_state(name, value)}
        patches.callback(_restore, owner, state)
    patches.callback(parameter_offload.FWD_MODULE_STACK.clear)
    patches.callback(unset_hf_deepspeed_config)


def _init_restores_the_planners_tensor(patches: Patches) -> None:
    """Let `zero.Init` put back the `torch.tensor` of the planner, not the one of its own import."""
    from deepspeed.runtime.zero import partition_parameters

    patches.set(partition_parameters, "_orig_torch_tensor", torch.tensor)


def _is_state(name: str, value: object) -> bool:
    return name == "linear" or (not name.startswith("__") and not callable(value)) or value is None


def _restore(owner: object, before: dict[str, object]) -> None:
    for name, value in before.items():
        if getattr(owner, name, None) is not value:
            setattr(owner, name, value)


def _ranks_agree(patches: Patches) -> None:
    """Skip stage 3's comparison of the order of modules with rank 0, which needs values."""
    from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator, stage3

    for module in (partition_parameters, partitioned_param_coordinator, stage3):
        patches.set(module, "assert_ints_same_as_other_ranks", lambda ints: None)


def _gradients_are_finite(patches: Patches) -> None:
    """Let has_overflow of both stages look at gradients, which takes memory, and find none."""
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    def looked(has_overflow: Callable[..., object], *args: object, **kwargs: object) -> bool:
        has_overflow(*args, **kwargs)
        return False

    patches.wrap(stage3.DeepSpeedZeroOptimizer_Stage3, "has_overflow", looked)
    patches.wrap(stage_1_and_2.DeepSpeedZeroOptimizer, "has_overflow", looked)
    for module in (stage3, stage_1_and_2):
        patches.set(module, "is_invalid_grad_norm", lambda norm: False)


def _streams(patches: Patches) -> None:
    """Let the engine find a default stream; a freed block is free at once here."""
    first: object = torch.cuda.current_stream()
    patches.set(torch.cuda, "default_stream", lambda device=None: first)
    patches.set(torch.Tensor, "record_stream", lambda tensor, stream: None)
    for name in ("range_push", "range_pop"):
        patches.set(torch.cuda.nvtx, name, lambda *_: 0)


class _Gather:
    """Holds what a gather sends until someone waits for it.

    So does NCCL's work (`stashed_for_allocator_safety_`, ProcessGroupNCCL.cpp). Weights that wait
    in main memory are sent from a copy on the card.
    """

    def __init__(self, gather: Callable[..., Any], sent: torch.Tensor, *to: Any, **group: Any):
        self.sent: torch.Tensor | None = sent
        self._work = gather(sent, *to, **group)

    def wait(self) -> None:
        self._work.wait()
        self.sent = None


def _gathers_hold_what_they_send(patches: Patches) -> None:
    """Let gathers hold what they send, at most until the training loop gathers something itself.

    What a backward pass needs first is fetched before a forward pass ends. Then TRL gathers its
    metrics: by then NCCL's watchdog, which looks every 100 ms, has seen that the fetches ended, and
    the next collective frees what they sent.
    """
    from accelerate import Accelerator
    from deepspeed.runtime.zero import partition_parameters

    begun: weakref.WeakSet[_Gather] = weakref.WeakSet()

    def fetched(gather: Callable[..., Any], *args: Any, **group: Any) -> _Gather:
        begun.add(made := _Gather(gather, *args, **group))
        return made

    def gathered(gather: Callable[..., object], *args: Any, **kwargs: Any) -> object:
        for each in begun:
            each.sent = None
        return gather(*args, **kwargs)

    patches.wrap(partition_parameters, "_dist_allgather_fn", fetched)
    patches.wrap(Accelerator, "gather", gathered)


class _Op:
    """Stands in for an operation of Adam in C++ or CUDA, which works in place without memory."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def _ops_are_not_built(patches: Patches) -> None:
    """Do not compile Adam (cpu_adam_impl.cpp, multi_tensor_adam.cu), whose states Python makes."""
    from deepspeed.ops.adam import cpu_adam, fused_adam

    for builder in (cpu_adam.CPUAdamBuilder, fused_adam.FusedAdamBuilder):
        patches.set(builder, "load", lambda *_, **__: _Op())


def _buffers_are_known(patches: Patches, tracker: Tracker) -> None:
    """Tag gathered weights, and the buckets in which gradients are reduced, as sharding buffers."""
    from deepspeed.runtime.zero import stage3
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    @contextlib.contextmanager
    def cutting(method: str) -> Iterator[None]:
        with tracker.as_category("sharding buffers"), _one_view_of_each_length(method):
            yield

    def buckets_set_up(set_up: Callable[..., None], optimizer: Any) -> None:
        set_up(optimizer)
        buffers = [buffer for bucket in optimizer.ipg_buckets.values() for buffer in bucket.buffer]
        optimizer.storages_of_buckets = [tracker.storage_of(buffer) for buffer in buffers]

    patches.surround(PartitionedParameterCoordinator, "fetch_sub_module", lambda: cutting("narrow"))
    patches.surround(stage3, "reduce_scatter_coalesced", lambda: cutting("__getitem__"))
    patches.wrap(DeepSpeedZeroOptimizer, "setup_buckets", buckets_set_up)


@contextlib.contextmanager
def _one_view_of_each_length(name: str) -> Iterator[None]:
    """Make one view for all parts of one length that a method of Tensor cuts.

    The engine cuts every gathered buffer (`narrow`, partition_parameters.py) and reduced gradient
    (`tensor[start:stop]`, coalesced_collectives.py) into the parts of all ranks, which takes nearly
    all of the time with 1024 of them. Without bytes, parts of the same length are alike.
    """
    alive: weakref.WeakValueDictionary[tuple[int, int, int], torch.Tensor]
    alive = weakref.WeakValueDictionary()

    def cut(original: Callable[..., torch.Tensor], tensor: torch.Tensor, *how: Any) -> torch.Tensor:
        if name == "narrow":
            dim, _, length = how
        elif isinstance(how[0], slice) and tensor.dim() == 1:
            dim, length = 0, len(range(*how[0].indices(tensor.numel())))
        else:
            return original(tensor, *how)
        key = (id(tensor), dim, length)
        view = alive.get(key)
        if view is None:
            view = alive[key] = original(tensor, *how)
        return view

    with Patches() as patches:
        patches.wrap(torch.Tensor, name, cut)
        yield


def _engines_are_watched(patches: Patches, tracker: Tracker, engines: list[Any]) -> None:
    """Count what an engine makes at its start as load, and refuse an engine that skips a step."""
    from deepspeed import DeepSpeedEngine

    def made(make: Callable[..., None], engine: object, *args: object, **kwargs: object) -> None:
        with tracker.during("load"):
            make(engine, *args, **kwargs)
        engines.append(engine)

    def stepped(
        step: Callable[..., object], engine: Any, *args: object, **kwargs: object
    ) -> object:
        _name_parts(engine, tracker)
        done = step(engine, *args, **kwargs)
        if engine.skipped_steps:
            raise NotPredicted("this DeepSpeed: its engine skips steps if tensors have no values")
        return done

    patches.wrap(DeepSpeedEngine, "__init__", made)
    patches.wrap(DeepSpeedEngine, "step", stepped)
    gathering = "_zero3_consolidated_16bit_state_dict"  # only rank 0 keeps what it gathers
    patches.surround(DeepSpeedEngine, gathering, lambda: tracker.host.in_ranks(1))


def _name_parts(engine: Any, tracker: Tracker) -> None:
    """Tag the flat buffers of the engine's optimizer, and the parts of weights: stage*.py."""
    optimizer = engine.optimizer
    for weight in engine.module.parameters():
        category: Category = "weights" if weight.requires_grad else "frozen weights"
        tracker.tag([getattr(weight, "ds_tensor", None)], category)
    for name, category in _PARTS.items():
        tracker.tag(_leaves(getattr(optimizer, name, None)), category)
    buckets = _leaves(getattr(optimizer, "ipg_buckets", None))
    tracker.tag((getattr(bucket, "buffer", None) for bucket in buckets), "sharding buffers")
    # stages 1 and 2: gradients were views into them
    for storage in getattr(optimizer, "storages_of_buckets", ()):
        if storage is not None:
            storage.category = "sharding buffers"


def _leaves(value: object) -> Iterator[object]:
    """Yield what is in a dict, a list, or lists in these."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value
