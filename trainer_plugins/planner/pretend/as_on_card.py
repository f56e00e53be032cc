"""Let tensors without bytes behave as on the card. Imports torch and transformers.

Without these patches, a run on fake tensors ends well and gives wrong numbers. Each patch has a
function that says why it is needed. `in_world` installs all of them, and removes them afterwards.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from trainer_plugins.patched import Patches
from trainer_plugins.planner.pretend import attention, flash_attn, speech, streams
from trainer_plugins.planner.tracing.kernels import KernelRules
from trainer_plugins.planner.tracing.trace import Tracker
from trainer_plugins.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Describes the card and the batches that are simulated."""

    device: str
    """The type of device: `cuda`, or `simgpu` if that is this process's accelerator."""

    capability: tuple[int, int] = (9, 0)
    """The compute capability of the card, which decides about kernels."""

    memory_bytes: int = 80 * GIB
    """The memory of the card, as a program is told that asks for it."""

    num_cards: int = 1
    """How many such cards the process has."""

    num_multiprocessors: int = 132
    """How many programs of a kernel run at once on the card."""

    has_padding: bool = False
    """Whether batches have padding. Then masks are kept, and attention takes another kernel."""

    packed_sequences: int = 0
    """How many sequences are packed into the rows, told apart by position ids. 0: a row is one.
    If rows are packed, masks are kept too."""


@contextlib.contextmanager
def in_world(world: World) -> Iterator[Tracker]:
    """Make every tensor inside the block fake, and let the tracker see every storage."""
    on_cuda = world.device == "cuda"
    tracker = Tracker(
        world.device, KernelRules(world.capability) if on_cuda else None, world.has_padding
    )
    patches = Patches()
    try:
        _data_can_be_set(patches)
        _copies_are_of_this_world(patches)
        _values_are_of_this_world(patches)
        _modules_can_be_moved(patches)
        _optimizers_take_lists(patches)
        _attention_as_on_the_card(patches, world)
        _no_tracing_path(patches)
        _masks(patches, tracker, world)
        _resized_storages_are_seen(patches, tracker)
        _shapes_of_dtensor_are_not(patches, tracker)
        _kv_cache_is_known(patches, tracker)
        _lists_have_one_value(patches, tracker)
        _lists_become_tensors(patches)
        _predictions_become_arrays(patches)
        speech.stand_in(patches, tracker, on_cuda)
        if on_cuda:
            _cuda_answers(patches, tracker, world)
            _one_kernel_each(patches)
        patches.wrap(torch.accelerator, "empty_cache", lambda original: tracker.emptied())
        tracker.not_watched = tuple(patches.missing)
        with FakeTensorMode(allow_non_fake_inputs=True) as fake_mode, tracker:
            tracker.fake_mode = fake_mode
            yield tracker
    finally:
        patches.close()


def _values_are_of_this_world(patches: Patches) -> None:
    """Let `torch.tensor(1.0, device=...)` make a fake tensor in a backward too.

    It makes a tensor on the host, and moves it before FakeTensorMode sees it, unless the thread was
    told not to. FakeTensorMode tells its own thread; a backward for a card runs in another.
    """

    def made(original: Callable[..., object], *args: object, **kwargs: object) -> object:
        torch._C._set_only_lift_cpu_tensors(True)
        return original(*args, **kwargs)

    for name in ("tensor", "as_tensor"):
        patches.wrap(torch, name, made)


def _modules_can_be_moved(patches: Patches) -> None:
    """Let Module.to keep fake parameters, and change only their data.

    torch replaces them by new ones, and an optimizer or an engine would keep the old ones.
    """
    original: Callable[..., torch.nn.Module] = torch.nn.Module._apply

    def apply(
        self: torch.nn.Module,
        fn: Callable[[torch.Tensor], torch.Tensor],
        recurse: bool = True,
    ) -> torch.nn.Module:
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


def _data_can_be_set(patches: Patches) -> None:
    """Let `tensor.data = other` change what a fake tensor keeps for itself: its device, its value.

    It has a value as in `torch.tensor(0.8)`, from which torch computes on the host.
    """
    data: Any = torch.Tensor.data

    def set_data(tensor: FakeTensor, other: torch.Tensor) -> None:
        data.__set__(tensor, other)
        if isinstance(other, FakeTensor):
            tensor.fake_device, tensor.constant = other.fake_device, other.constant

    patches.set(FakeTensor, "data", property(data.__get__, set_data))


def _copies_are_of_this_world(patches: Patches) -> None:
    """Let `copy.deepcopy` of a fake tensor keep its mode.

    A copied mode has copies of weak references to storages. Such a copy
    (torch/multiprocessing/reductions.py, StorageWeakRef) releases a count that it never took. It
    then writes to memory that was reused, and the process crashes somewhere else.
    """
    patches.set(FakeTensorMode, "__deepcopy__", lambda mode, memo: mode)


def _optimizers_take_lists(patches: Patches) -> None:
    """Let optimizers choose foreach for fake tensors too.

    They choose it by the exact type of a parameter. Its temporaries are as large as the model.
    """
    for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        module = importlib.import_module(name)
        if hasattr(module, "_foreach_supported_types"):
            patches.set(
                module, "_foreach_supported_types", [*module._foreach_supported_types, FakeTensor]
            )


def _attention_as_on_the_card(patches: Patches, world: World) -> None:
    chosen: Callable[..., torch.Tensor] = attention.simgpu_attention
    if world.device == "cuda":
        chosen = functools.partial(attention.cuda_attention, capability=world.capability)
        flash_attn.stand_in(patches, world.capability, world.packed_sequences)
    # context parallelism replaces it by its name
    named = functools.update_wrapper(chosen, torch.nn.functional.scaled_dot_product_attention)
    patches.set(torch.nn.functional, "scaled_dot_product_attention", named)


def _no_tracing_path(patches: Patches) -> None:
    """Let transformers take fake tensors for real ones.

    It believes that a graph is being traced otherwise: it then makes every mask, and avoids flash.
    """
    import transformers.utils.import_utils as module

    if hasattr(module, "is_fake_tensor"):
        patches.set(module, "is_fake_tensor", lambda tensor: False)


def _masks(patches: Patches, tracker: Tracker, world: World) -> None:
    """Answer questions about masks without values.

    transformers drops a mask that is all ones. The tracker answers `mask.all()`; `fast_all` is the
    other way to ask, of transformers 5. Whether the positions of a row begin anew in its middle is
    asked by `all` too.
    """
    import transformers.masking_utils as module

    def fast_all(original: Callable[..., object], tensor: torch.Tensor) -> bool:
        original(tensor)
        return not tracker.has_padding

    def find_packed(original: Callable[..., object], positions: torch.Tensor) -> object:
        tracker.checks_hold = not world.packed_sequences
        try:
            return original(positions)
        finally:
            tracker.checks_hold = True

    if hasattr(module, "fast_all"):
        patches.wrap(module, "fast_all", fast_all)
    patches.wrap(module, "find_packed_sequence_indices", find_packed)


def _resized_storages_are_seen(patches: Patches, tracker: Tracker) -> None:
    """Tell the tracker of `resize_`, by which FSDP takes and frees memory: it is not dispatched."""

    def resize_(
        original: Callable[..., object], storage: torch.UntypedStorage, num_bytes: int
    ) -> object:
        result = original(storage, num_bytes)
        tracker.resized(storage)
        return result

    patches.wrap(torch.UntypedStorage, "resize_", resize_)


def _shapes_of_dtensor_are_not(patches: Patches, tracker: Tracker) -> None:
    """Do not count the fake tensors of whole size with which DTensor infers shapes."""
    try:
        from torch.distributed.tensor._sharding_prop import ShardingPropagator
    except ImportError:
        return

    def paused(original: Callable[..., object], *args: object, **kwargs: object) -> object:
        tracker.paused = True
        try:
            return original(*args, **kwargs)
        finally:
            tracker.paused = False

    patches.wrap(ShardingPropagator, "_propagate_tensor_meta_non_cached", paused)


def _kv_cache_is_known(patches: Patches, tracker: Tracker) -> None:
    """Tag what a KV cache returns: that is what it keeps."""
    from transformers import cache_utils

    def update(
        original: Callable[..., tuple[torch.Tensor, ...]], *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, ...]:
        kept = original(*args, **kwargs)
        tracker.tag(kept, "KV cache")
        return kept

    patches.wrap(cache_utils.Cache, "update", update)


def _lists_have_one_value(patches: Patches, tracker: Tracker) -> None:
    """Let `tolist` ask for one value, and not for each of thousands of tokens, if none is known."""

    def tolist(tensor: torch.Tensor) -> Any:
        if (told := tracker.values.told(tensor)) is not None:
            return told
        listed: Any = tensor.flatten()[0].item() if tensor.numel() else None
        for length in reversed(tensor.shape):
            listed = [listed] * length
        return listed

    patches.set(FakeTensor, "tolist", tolist)


def _lists_become_tensors(patches: Patches) -> None:
    """Let `torch.tensor` ask the tensors of a list for their values, which it would read itself."""

    def tensor(original: Callable[..., object], data: Any, **how: object) -> object:
        if isinstance(data, list) and data and isinstance(data[0], FakeTensor):
            data = [each.item() for each in data]
        return original(data, **how)

    patches.wrap(torch, "tensor", tensor)


def _predictions_become_arrays(patches: Patches) -> None:
    """Let evaluation turn predictions into numpy arrays of their shape that share one element.

    Each holds a fake tensor of the main memory that a real array takes, also when they are joined.
    """
    import numpy
    from transformers import trainer, trainer_pt_utils

    class Array(numpy.ndarray[Any, Any]):
        kept: torch.Tensor | None = None

        def __array_finalize__(self, other: Any) -> None:
            self.kept = getattr(other, "kept", None)

    def array(kept: torch.Tensor) -> Array:
        one = numpy.ones((), dtype=str(kept.dtype).removeprefix("torch."))
        found = numpy.broadcast_to(one, tuple(kept.shape)).view(Array)
        found.kept = kept
        return found

    def numpify(tensors: Any) -> Any:
        if isinstance(tensors, (list, tuple)):
            return type(tensors)(numpify(each) for each in tensors)
        if isinstance(tensors, dict):
            return type(tensors)({name: numpify(each) for name, each in tensors.items()})
        on_host = tensors.cpu()
        if on_host.dtype == torch.bfloat16:
            on_host = on_host.to(torch.float32)
        return array(on_host)

    def join(one: Any, other: Any, padding_index: int = -100) -> Any:
        one, other = numpy.atleast_1d(one), numpy.atleast_1d(other)
        longer = one.shape[1:] if one.shape[1:2] >= other.shape[1:2] else other.shape[1:]
        dtype = getattr(torch, str(one.dtype))
        return array(torch.empty((len(one) + len(other), *longer), dtype=dtype))

    patches.set(trainer_pt_utils, "numpy_pad_and_concatenate", join)
    for module in (trainer, trainer_pt_utils):
        if hasattr(module, "nested_numpify"):
            patches.set(module, "nested_numpify", numpify)


def _one_kernel_each(patches: Patches) -> None:
    """Let the backward of SiLU and Mish allocate its result alone, as their CUDA kernels do.

    A build without CUDA has no such kernels, and takes them apart into six operations
    (native_functions.yaml: CompositeImplicitAutograd beside CPU and CUDA).
    """
    for name in ("silu_backward", "mish_backward"):
        library = patches.enter_context(torch.library._scoped_library("aten", "IMPL"))
        library.impl(name, lambda gradient, x: torch.empty_like(x), "AutogradCUDA")


def _cuda_answers(patches: Patches, tracker: Tracker, world: World) -> None:
    """Answer what programs ask torch.cuda before and between steps."""
    import transformers

    class Properties:
        name = "a card that is not there"
        major, minor = world.capability
        total_memory = world.memory_bytes
        multi_processor_count = world.num_multiprocessors
        gcnArchName = ""  # noqa: N815 - torch's name
        uuid = "00000000-0000-0000-0000-000000000000"

    def allocated(device: Any = None) -> int:
        index = device if isinstance(device, int) else torch.device(device or "cuda").index
        return tracker.allocated_bytes[index or 0]

    answers: dict[str, object] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: world.num_cards,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": contextlib.nullcontext,  # as in `with torch.cuda.device(0):`
        "get_device_capability": lambda device=None: world.capability,
        "get_device_properties": lambda device=None: Properties,
        "get_device_name": lambda device=None: Properties.name,
        "is_bf16_supported": lambda including_emulation=True: world.capability >= (8, 0),
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "is_current_stream_capturing": lambda: False,
        "empty_cache": tracker.emptied,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device="cuda": torch.empty(0, dtype=torch.uint8),
        "get_rng_state_all": list,
        "set_rng_state": lambda state, device="cuda": None,
        "set_rng_state_all": lambda states: None,
        "mem_get_info": lambda device=None: (
            world.memory_bytes - allocated(device),
            world.memory_bytes,
        ),
        "memory_allocated": allocated,
        "max_memory_allocated": allocated,
        "memory_reserved": allocated,
        "max_memory_reserved": allocated,
        "reset_peak_memory_stats": lambda device=None: None,
        "memory_stats": lambda device=None: {},
        **streams.answers(tracker),
    }
    for name, answer in answers.items():
        patches.set(torch.cuda, name, answer)
    patches.set(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    # transformers asks the build of torch too, which may have no CUDA
    has_tf32 = world.capability >= (8, 0)
    patches.set(transformers.training_args, "is_torch_tf32_available", lambda: has_tf32)
    # FakeTensorMode would initialise CUDA to learn the number of the current device.
    patches.set(FakeTensorMode, "avoid_device_init", property(lambda self: True))
