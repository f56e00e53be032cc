"""The world of a prediction: tensors without bytes that behave as on the card.

Each trap on the way has its function.

Without these a run on fake tensors ends well and gives wrong numbers. `in_world` puts all in place
and takes all back.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from trainer_plugins.planner.pretend import attention
from trainer_plugins.planner.tracing.kernels import KernelRules
from trainer_plugins.planner.tracing.trace import Tracker
from trainer_plugins.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What to pretend."""

    device: str
    """`cuda`, or `simgpu` where that is this process's accelerator."""

    capability: tuple[int, int] = (9, 0)
    """The compute capability, which decides what kernels need."""

    memory_bytes: int = 80 * GIB
    """What a program is told that asks for the size of the card."""

    has_padding: bool = False
    """Whether batches have padding: then masks are real, and attention takes another kernel."""

    is_packed: bool = False
    """Whether several sequences share a row without padding, told apart by their positions: then too."""


class _Patches:
    """What was there before, put back in reverse order."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._stack.enter_context(patch.object(owner, name, value, create=True))

    def wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """`wrapper(original, *args, **kwargs)` in place of `original`; nothing where a version has no such function."""
        original = getattr(owner, name, None)
        if original is not None:
            self.set(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))

    def close(self) -> None:
        self._stack.close()


@contextlib.contextmanager
def in_world(world: World) -> Iterator[Tracker]:
    """Live in it: every tensor made inside is fake, and the tracker sees every storage."""
    on_cuda = world.device == "cuda"
    tracker = Tracker(
        world.device, KernelRules(world.capability) if on_cuda else None, world.has_padding
    )
    patches = _Patches()
    try:
        _data_can_be_set(patches)
        _copies_are_of_this_world(patches)
        _modules_can_be_moved(patches)
        _optimizers_take_lists(patches)
        _attention_as_on_the_card(patches, world)
        _no_tracing_path(patches)
        _masks(patches, tracker, world)
        _resized_storages_are_seen(patches, tracker)
        _shapes_of_dtensor_are_not(patches, tracker)
        _kv_cache_is_known(patches, tracker)
        _predictions_become_arrays(patches)
        if on_cuda:
            _cuda_answers(patches, tracker, world)
        patches.wrap(torch.accelerator, "empty_cache", lambda original: tracker.emptied())
        with FakeTensorMode(allow_non_fake_inputs=True) as fake_mode, tracker:
            tracker.fake_mode = fake_mode
            yield tracker
    finally:
        patches.close()


def _modules_can_be_moved(patches: _Patches) -> None:
    """Module.to replaces the parameters where they are fake, and an optimizer or an engine would keep the old ones."""
    original: Any = torch.nn.Module._apply

    def apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        if not any(
            isinstance(tensor, FakeTensor) for tensor in (*self.parameters(), *self.buffers())
        ):
            return original(self, fn, recurse)
        if recurse:
            for child in self.children():
                apply(child, fn, recurse)
        for key, parameter in self._parameters.items():
            if parameter is not None:
                with torch.no_grad():
                    moved = fn(parameter)
                if moved is parameter:
                    continue
                if torch._has_compatible_shallow_copy_type(parameter, moved):
                    parameter.data = moved
                else:  # to the device "meta": as in torch's own
                    self._parameters[key] = torch.nn.Parameter(moved, parameter.requires_grad)
        for key, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[key] = fn(buffer)
        return self

    patches.set(torch.nn.Module, "_apply", apply)


def _data_can_be_set(patches: _Patches) -> None:
    """`tensor.data = other` takes the device along, which a fake tensor notes for itself."""
    data: Any = torch.Tensor.data

    def set_data(tensor: Any, other: Any) -> None:
        data.__set__(tensor, other)
        if isinstance(other, FakeTensor):
            tensor.fake_device = other.fake_device

    patches.set(FakeTensor, "data", property(data.__get__, set_data))


def _copies_are_of_this_world(patches: _Patches) -> None:
    """`copy.deepcopy` of a fake tensor copies the mode it is of, and with it weak references to storages.

    A copied one (torch/multiprocessing/reductions.py, StorageWeakRef) gives back a count that it
    never took: memory that belongs to somebody else by then is written to, and the process ends
    somewhere else.
    """
    patches.set(FakeTensorMode, "__deepcopy__", lambda mode, memo: mode)


def _optimizers_take_lists(patches: _Patches) -> None:
    """Optimizers choose foreach, which needs a temporary as large as the model, by the exact type of a parameter."""
    for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        module = importlib.import_module(name)
        if hasattr(module, "_foreach_supported_types"):
            patches.set(
                module, "_foreach_supported_types", [*module._foreach_supported_types, FakeTensor]
            )


def _attention_as_on_the_card(patches: _Patches, world: World) -> None:
    chosen: Any = attention.simgpu_attention
    if world.device == "cuda":
        chosen = functools.partial(attention.cuda_attention, capability=world.capability)
    patches.set(torch.nn.functional, "scaled_dot_product_attention", chosen)


def _no_tracing_path(patches: _Patches) -> None:
    """Fake tensors are to transformers a graph that is being traced: it makes every mask, and leaves flash."""
    import transformers.utils.import_utils as module

    if hasattr(module, "is_fake_tensor"):
        patches.set(module, "is_fake_tensor", lambda tensor: False)


def _masks(patches: _Patches, tracker: Tracker, world: World) -> None:
    """Whether a mask is all ones decides whether there is a mask: a question to values, which are not there.

    The tracker answers `mask.all()`; this is the other way to ask, of transformers 5. And whether
    the positions of a row begin anew in its middle, which is asked by `all` too.
    """
    import transformers.masking_utils as module

    def fast_all(original: Any, tensor: Any) -> bool:
        original(tensor)
        return not world.has_padding

    def find_packed(original: Any, positions: Any) -> Any:
        tracker.checks_hold = not world.is_packed
        try:
            return original(positions)
        finally:
            tracker.checks_hold = True

    patches.wrap(module, "fast_all", fast_all)
    patches.wrap(module, "find_packed_sequence_indices", find_packed)


def _resized_storages_are_seen(patches: _Patches, tracker: Tracker) -> None:
    """FSDP frees and takes memory by `resize_`, which is no operation and so is not dispatched."""

    def resize_(original: Any, storage: Any, num_bytes: int) -> Any:
        result = original(storage, num_bytes)
        tracker.resized(storage)
        return result

    patches.wrap(torch.UntypedStorage, "resize_", resize_)


def _shapes_of_dtensor_are_not(patches: _Patches, tracker: Tracker) -> None:
    """DTensor works out shapes with fake tensors of its own, of the whole size, that no card ever holds."""
    try:
        from torch.distributed.tensor._sharding_prop import ShardingPropagator
    except ImportError:
        return

    def paused(original: Any, *args: Any, **kwargs: Any) -> Any:
        tracker.paused = True
        try:
            return original(*args, **kwargs)
        finally:
            tracker.paused = False

    patches.wrap(ShardingPropagator, "_propagate_tensor_meta_non_cached", paused)


def _kv_cache_is_known(patches: _Patches, tracker: Tracker) -> None:
    """What a cache returns is what it keeps."""
    from transformers import cache_utils

    def update(original: Any, *args: Any, **kwargs: Any) -> Any:
        kept = original(*args, **kwargs)
        tracker.tag(kept, "KV cache")
        return kept

    patches.wrap(cache_utils.Cache, "update", update)


def _predictions_become_arrays(patches: _Patches) -> None:
    """Evaluation turns predictions into numpy arrays; here into arrays of their shape without bytes of their own."""
    import numpy
    from transformers import trainer, trainer_pt_utils

    def numpify(tensors: Any) -> Any:
        if isinstance(tensors, (list, tuple)):
            return type(tensors)(numpify(each) for each in tensors)
        if isinstance(tensors, dict):
            return type(tensors)({name: numpify(each) for name, each in tensors.items()})
        on_host = tensors.cpu()
        if on_host.dtype == torch.bfloat16:
            on_host = on_host.to(torch.float32)
        dtype = str(on_host.dtype).removeprefix("torch.")
        return numpy.broadcast_to(numpy.ones((), dtype=dtype), tuple(on_host.shape))

    for module in (trainer, trainer_pt_utils):
        if hasattr(module, "nested_numpify"):
            patches.set(module, "nested_numpify", numpify)


def _cuda_answers(patches: _Patches, tracker: Tracker, world: World) -> None:
    """What programs ask torch.cuda before and between steps."""

    class Properties:
        name = "a card that is not there"
        major, minor = world.capability
        total_memory = world.memory_bytes
        multi_processor_count = 132
        gcnArchName = ""  # noqa: N815 - torch's name
        uuid = "00000000-0000-0000-0000-000000000000"

    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_capability": lambda device=None: world.capability,
        "get_device_properties": lambda device=None: Properties,
        "get_device_name": lambda device=None: Properties.name,
        "is_bf16_supported": lambda including_emulation=True: world.capability >= (8, 0),
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "is_current_stream_capturing": lambda: False,
        "empty_cache": tracker.emptied,
        "synchronize": lambda device=None: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device="cuda": torch.empty(0, dtype=torch.uint8),
        "get_rng_state_all": list,
        "set_rng_state": lambda state, device="cuda": None,
        "set_rng_state_all": lambda states: None,
        "mem_get_info": lambda device=None: (
            world.memory_bytes - tracker.allocated_bytes,
            world.memory_bytes,
        ),
        "memory_allocated": lambda device=None: tracker.allocated_bytes,
        "max_memory_allocated": lambda device=None: tracker.allocated_bytes,
        "memory_reserved": lambda device=None: tracker.allocated_bytes,
        "max_memory_reserved": lambda device=None: tracker.allocated_bytes,
        "reset_peak_memory_stats": lambda device=None: None,
        "memory_stats": lambda device=None: {},
    }
    for name, answer in answers.items():
        patches.set(torch.cuda, name, answer)
    patches.set(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    # FakeTensorMode would begin CUDA to learn the number of the current device.
    patches.set(FakeTensorMode, "avoid_device_init", property(lambda self: True))
