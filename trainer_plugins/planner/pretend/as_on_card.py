"""Let tensors without bytes behave as on the card. Imports torch and transformers.

Without these patches, a run on fake tensors succeeds and gives wrong numbers. Each patch has a
function that says why it is needed. `in_world` installs all of them, and removes them afterwards.
"""

import contextlib
import functools
import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from trainer_plugins.patched import Patches
from trainer_plugins.planner.cards import Card, prefers_cudnn
from trainer_plugins.planner.pretend import attention, cuda
from trainer_plugins.planner.tracing.kernels import KernelRules
from trainer_plugins.planner.tracing.trace import Tracker
from trainer_plugins.units import GIB

ANY_CARD = Card(name="any card", capacity_bytes=80 * GIB)  # of a run that names none


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Describes the card and the batches that are simulated."""

    device: str  # the type of device: `cuda`, or `simgpu` if that is this process's accelerator
    card: Card = ANY_CARD
    num_cards: int = 1  # how many such cards the process has
    has_padding: bool = False  # then masks are kept, and attention takes another kernel
    packed_sequences: int = 0  # in the rows, apart by position ids only; 0: a row is one
    has_flash_attn: bool = True  # whether the run may call the package flash-attn


@contextlib.contextmanager
def in_world(world: World) -> Iterator[Tracker]:
    """Make every tensor inside the block fake, and let the tracker see every storage."""
    on_cuda = world.device == "cuda"
    card = world.card
    kernels = KernelRules(card.capability, card.num_multiprocessors, card.num_threads)
    rules = kernels if on_cuda else None
    tracker = Tracker(world.device, rules, world.has_padding)
    with Patches() as patches:
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
        _ctc_losses_need_no_values(patches, tracker, on_cuda)
        _no_layer_is_left_out(patches)
        if on_cuda:
            cuda.answer(patches, tracker, world.card, world.num_cards)
        patches.wrap(torch.accelerator, "empty_cache", lambda original: tracker.emptied())
        tracker.not_watched = tuple(patches.missing)
        with FakeTensorMode(allow_non_fake_inputs=True) as fake_mode, tracker:
            tracker.fake_mode = fake_mode
            yield tracker


def forget_accelerate() -> None:
    """Reset accelerate's state: a process has one, and each prediction is another run."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def _values_are_of_this_world(patches: Patches) -> None:
    """Let `torch.tensor(1.0, device=...)` make a fake tensor in a backward's thread too."""

    def made(original: Callable[..., object], *args: object, **kwargs: object) -> object:
        torch._C._set_only_lift_cpu_tensors(True)
        return original(*args, **kwargs)

    for name in ("tensor", "as_tensor"):
        patches.wrap(torch, name, made)


def _modules_can_be_moved(patches: Patches) -> None:
    """Let Module.to change only the data of fake parameters, as an optimizer holds them."""
    original: Callable[..., torch.nn.Module] = torch.nn.Module._apply

    def apply(
        self: torch.nn.Module,
        fn: Callable[[torch.Tensor], torch.Tensor],
        recurse: bool = True,
    ) -> torch.nn.Module:
        if not any(isinstance(each, FakeTensor) for each in (*self.parameters(), *self.buffers())):
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
    """Let `tensor.data = other` change the device and the value that a fake tensor keeps."""
    data: Any = torch.Tensor.data

    def set_data(tensor: FakeTensor, other: torch.Tensor) -> None:
        data.__set__(tensor, other)
        if isinstance(other, FakeTensor):
            tensor.fake_device, tensor.constant = other.fake_device, other.constant

    patches.set(FakeTensor, "data", property(data.__get__, set_data))


def _copies_are_of_this_world(patches: Patches) -> None:
    """Let `copy.deepcopy` of a fake tensor keep its mode.

    A copied mode has copies of weak references to storages (StorageWeakRef): they release counts
    that they never took, and the process crashes somewhere else.
    """
    patches.set(FakeTensorMode, "__deepcopy__", lambda mode, memo: mode)

    copy: Any = torch.Tensor.__deepcopy__

    def copied(tensor: FakeTensor, memo: dict[int, object]) -> object:
        if tensor.constant is not None:  # a real tensor, which no fake mode can copy
            memo[id(tensor.constant)] = tensor.constant
        return copy(tensor, memo)

    patches.set(FakeTensor, "__deepcopy__", copied)


def _optimizers_take_lists(patches: Patches) -> None:
    """Let optimizers choose foreach, which has large temporaries, for fake tensors too."""
    for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        module = importlib.import_module(name)
        if hasattr(module, "_foreach_supported_types"):
            kinds = [*module._foreach_supported_types, FakeTensor]
            patches.set(module, "_foreach_supported_types", kinds)


def _attention_as_on_the_card(patches: Patches, world: World) -> None:
    chosen: Callable[..., torch.Tensor] = attention.simgpu_attention
    if world.device == "cuda":
        capability = world.card.capability
        chosen = functools.partial(
            attention.cuda_attention,
            capability=capability,
            prefers_cudnn=prefers_cudnn(str(torch.__version__), capability),
        )
    # context parallelism replaces it by its name
    named = functools.update_wrapper(chosen, torch.nn.functional.scaled_dot_product_attention)
    patches.set(torch.nn.functional, "scaled_dot_product_attention", named)
    if world.device == "cuda" and world.has_flash_attn:
        from trainer_plugins.planner.pretend import flash_attn

        flash_attn.stand_in(patches, world.card.capability, world.packed_sequences)


def _no_tracing_path(patches: Patches) -> None:
    """Let transformers take fake tensors for real ones: in a traced graph it makes every mask."""
    import transformers.utils.import_utils as module

    if hasattr(module, "is_fake_tensor"):
        patches.set(module, "is_fake_tensor", lambda tensor: False)


def _masks(patches: Patches, tracker: Tracker, world: World) -> None:
    """Answer without values whether a mask is all ones, and whether rows are packed."""
    import transformers.masking_utils as module

    def fast_all(original: Callable[..., object], tensor: torch.Tensor) -> bool:
        original(tensor)
        return not tracker.has_padding

    def find_packed(original: Callable[..., object], positions: torch.Tensor) -> object:
        tracker.checks_hold = not (world.packed_sequences or tracker.has_packed_rows)
        try:
            return original(positions)
        finally:
            tracker.checks_hold = True

    if hasattr(module, "fast_all"):
        patches.wrap(module, "fast_all", fast_all)
    patches.wrap(module, "find_packed_sequence_indices", find_packed)


def _resized_storages_are_seen(patches: Patches, tracker: Tracker) -> None:
    """Tell the tracker of `resize_`, with which FSDP takes and frees memory: it is no operation."""

    def resize_(
        original: Callable[..., object], storage: torch.UntypedStorage, num_bytes: int
    ) -> object:
        result = original(storage, num_bytes)
        tracker.resized(storage)
        return result

    patches.wrap(torch.UntypedStorage, "resize_", resize_)


def _shapes_of_dtensor_are_not(patches: Patches, tracker: Tracker) -> None:
    """Do not count the fake tensors of full size with which DTensor infers shapes."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    patches.surround(ShardingPropagator, "_propagate_tensor_meta_non_cached", tracker.resting)


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

    Each array holds a fake tensor of the main memory that a real one takes.
    """
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
        return array(on_host.to(torch.float32) if on_host.dtype == torch.bfloat16 else on_host)

    def join(one: Any, other: Any, padding_index: int = -100) -> Any:
        one, other = numpy.atleast_1d(one), numpy.atleast_1d(other)
        longer = one.shape[1:] if one.shape[1:2] >= other.shape[1:2] else other.shape[1:]
        dtype = getattr(torch, str(one.dtype))
        return array(torch.empty((len(one) + len(other), *longer), dtype=dtype))

    patches.set(trainer_pt_utils, "numpy_pad_and_concatenate", join)
    for module in (trainer, trainer_pt_utils):
        if hasattr(module, "nested_numpify"):
            patches.set(module, "nested_numpify", numpify)


def _ctc_losses_need_no_values(patches: Patches, tracker: Tracker, on_cuda: bool) -> None:
    """Let a CTC loss be counted, although the lengths of labels have no values."""

    def ctc_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        from trainer_plugins.planner.pretend import speech

        return speech.CtcLoss(tracker, on_cuda)(*args, **kwargs)

    patches.set(torch, "ctc_loss", ctc_loss)


def _no_layer_is_left_out(patches: Patches) -> None:
    """Let LayerDrop, which draws by numpy, keep every layer: draw the highest number."""

    def highest(original: Callable[..., object], size: Any = None) -> object:
        return original(size) if size is not None else math.nextafter(1.0, 0.0)

    patches.wrap(numpy.random, "random", highest)
