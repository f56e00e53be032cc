"""Streams the frozen weights of a model's layers to the card just before they are used."""

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from trainer_plugins.patched import Patches
from trainer_plugins.streaming.guard import Guarded, make_guarded
from trainer_plugins.streaming.layers import frozen_weights
from trainer_plugins.streaming.weight import StreamedWeight
from trainer_plugins.wrapped import tensors_in

logger = logging.getLogger(__name__)

# parameters of a model that DDP does not broadcast
DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"

_NAME = "_streamed_by"


def stream_of(model: nn.Module) -> "Stream | None":
    """Return the stream of a model; None if it is not streamed."""
    return getattr(model, _NAME, None)


class _Layer:
    def __init__(self, weights: list[StreamedWeight]) -> None:
        self.weights = weights
        self.num_bytes = sum(weight.num_bytes for weight in weights)
        self.is_written = False
        self._ready: torch.cuda.Event | None = None

    def fetch(self, stream: torch.cuda.Stream | None) -> None:
        """Allocate memory on the card and fill it; with a side stream, call `wait` before use."""
        try:
            for weight in self.weights:
                weight.allocate()
        except BaseException:
            self.drop()
            raise
        if stream is None:
            for weight in self.weights:
                weight.fill()
            return
        # The memory may have been another layer's, whose kernels are still running.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for weight in self.weights:
                weight.fill(non_blocking=True)
            self._ready = stream.record_event()

    def wait(self) -> None:
        if self._ready is not None:
            torch.cuda.current_stream().wait_event(self._ready)
            self._ready = None

    def drop(self) -> None:
        """Free the memory on the card, keeping anything written there."""
        self.wait()  # if fetched in vain, finish the copy before the memory is reused
        self.write_back()
        self.is_written = False
        for weight in self.weights:
            weight.drop()

    def write_back(self) -> None:
        """Copy the weights to main memory if they may have been modified on the card."""
        if self.is_written:
            for weight in self.weights:
                weight.write_back()


class Stream:
    """Streams the frozen weights of one model until `remove` is called or its `with` block ends.

    A layer is fetched before its forward pass, and again when the gradient of its output is known:
    before its backward pass, and before any recomputation of its activations. The next layer is
    fetched while it computes. The least recently used layer leaves the card.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        resident_layers: int = 2,
        with_embeddings: bool = False,
    ) -> None:
        self.num_fetched = self.fetched_bytes = 0  # layers and bytes copied so far
        self.resident_layers, self.with_embeddings = resident_layers, with_embeddings
        self.is_saving = False  # while a layer's `state_dict` is taken
        self._device = torch.empty(0, device=device).device  # with its index
        self._model = model
        self._undo = Patches()  # restores hooks, classes and attributes
        self._here: OrderedDict[int, None] = OrderedDict()
        self._depth = 0  # number of nested layers in their forward pass
        is_cuda = self._device.type == "cuda"
        self._side = torch.cuda.Stream() if is_cuda else None  # type: ignore[no-untyped-call]
        self._guards: dict[type, type] = {}
        self._layers: list[_Layer] = []
        self._weights: dict[int, StreamedWeight] = {}
        pins = is_cuda and _can_pin()
        try:
            for module, shown in frozen_weights(model, with_embeddings):
                self._add(module, shown, pins)
            nn.Module.to(model, self._device)  # bitsandbytes models reject their own `to`
            self._move_tables(self._device)
        except BaseException:
            self._undo.close()
            for weight in self._weights.values():
                weight.shown.data = weight.host
            raise
        part: Any
        for part in model.modules():
            if "hf_device_map" in vars(part):  # from `from_pretrained(device_map="cpu")`
                part.hf_device_map = {"": self._device.index}
        names = [name for name, one in model.named_parameters() if id(one) in self._weights]
        ignored = self._undo.enter_context(Patches(keeps_later=True))
        ignored.set(model, DDP_IGNORES, [*getattr(model, DDP_IGNORES, ()), *names])
        self._undo.set(model, _NAME, self)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def num_bytes(self) -> int:
        """Return the size of all streamed weights, which are in main memory."""
        return sum(layer.num_bytes for layer in self._layers)

    @property
    def resident_bytes(self) -> int:
        """Return the bytes on the card if the largest layers are resident."""
        sizes = sorted((layer.num_bytes for layer in self._layers), reverse=True)
        return sum(sizes[: self.resident_layers])

    @property
    def is_computing(self) -> bool:
        """Return whether a layer is computing, forward or backward."""
        return self._depth > 0 or _is_in_backward()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Omit the stream from copies and pickles of the model: they are not streamed."""
        return type(None), ()

    def weight_of(self, shown: torch.Tensor) -> StreamedWeight:
        return self._weights[id(shown)]

    def get_copy(self, shown: torch.Tensor) -> torch.Tensor:
        """Return the main-memory copy of a streamed tensor; return any other tensor unchanged."""
        weight = self._weights.get(id(shown))
        return shown if weight is None else weight.host

    def need(self, number: int, *_: object) -> None:
        """Bring a layer to the card, and the next one: in a backward pass, the one before it."""
        self._bring([number])
        self._layers[number].wait()
        following = number + (-1 if _is_in_backward() else 1)
        if self.resident_layers > 1 and 0 <= following < len(self._layers):
            self._bring([following, number])

    def bring(self, weights: Iterable[StreamedWeight]) -> None:
        """Bring the layers of these weights to the card, all at once."""
        numbers = list({weight.layer for weight in weights})
        self._bring(numbers)
        for number in numbers:
            self._layers[number].wait()

    def lend(self, weights: Iterable[StreamedWeight], is_written: bool) -> None:
        """Remember that other code may write to these weights, or just has."""
        for weight in weights:
            layer = self._layers[weight.layer]
            layer.is_written = layer.is_written or is_written or weight.is_held

    def release(self) -> None:
        """Take every layer off the card, for example after an error, unless other code holds it."""
        self._make_room(0)

    def remove(self) -> None:
        """Bring everything to the card and end the streaming. A second call does nothing.

        Raises:
            torch.OutOfMemoryError: it does not fit on the card. Nothing has changed then.
        """
        if stream_of(self._model) is not self:
            return
        try:
            self.bring(self._weights.values())
        except BaseException:
            self.release()
            raise
        self._undo.close()

    def leave(self) -> None:
        """End the streaming, leaving every weight in main memory."""
        for layer in self._layers:
            layer.wait()
            layer.write_back()
        self._undo.close()
        for weight in self._weights.values():
            weight.stay()
        self._move_tables("cpu")

    def _move_tables(self, device: torch.device | str) -> None:
        """Move the tables of bitsandbytes weights, which otherwise move only with their weight."""
        for weight in self._weights.values():
            if (state := getattr(weight.shown, "quant_state", None)) is not None:
                state.to(device)

    def _add(self, module: nn.Module, shown: list[torch.Tensor], pins: bool) -> None:
        number = len(self._layers)
        for one in shown:
            self._weights[id(one)] = StreamedWeight(one, number, self._device, pins)
            kind = type(one)
            if isinstance(one, nn.Parameter):
                if kind not in self._guards:
                    self._guards[kind] = make_guarded(kind, self)
                self._undo.callback(setattr, one, "__class__", kind)
                one.__class__ = self._guards[kind]
        self._layers.append(_Layer([self._weights[id(one)] for one in shown]))
        hooked: Any = module  # torch does not type its hooks
        leave = _Hook(self._leave, number)
        for handle in (
            hooked.register_forward_pre_hook(_Hook(self._enter, number)),
            hooked.register_forward_hook(leave, with_kwargs=True, always_call=True),
            hooked.register_state_dict_pre_hook(_Hook(self._prepare_state_dict, number)),
            hooked.register_state_dict_post_hook(_Hook(self._fill_state_dict, number)),
        ):
            self._undo.enter_context(handle)

    def _enter(self, number: int, *_: object) -> None:
        self._depth += 1
        self.is_saving = False  # a `state_dict` that raised left it set
        self.need(number)

    def _leave(
        self, number: int, _: object, args: object, kwargs: object, output: object = None
    ) -> None:
        """Fetch the layer again as soon as the gradient of one of its outputs is known."""
        self._depth -= 1
        if not torch.is_grad_enabled():
            return
        # A value passed through all layers (T5's position_bias) gets its gradient last.
        passed_on = {id(one) for one in tensors_in((args, kwargs))}
        one: Any
        for one in tensors_in(output):
            if one.grad_fn is not None and id(one) not in passed_on:
                one.register_hook(_Hook(self.need, number))

    def _prepare_state_dict(self, number: int, *_: object) -> None:
        layer = self._layers[number]
        if not all(isinstance(weight.shown, nn.Parameter) for weight in layer.weights):
            self.bring(layer.weights)  # bitsandbytes writes its scales too
        layer.write_back()
        self.is_saving = True

    def _fill_state_dict(
        self, number: int, _: object, state: dict[str, Any], prefix: str, *__: object
    ) -> None:
        """Put the main-memory copies into the state dict: absent weights would be saved empty."""
        self.is_saving = False
        host = {
            weight.on_card.untyped_storage()._cdata: weight.host
            for weight in self._layers[number].weights
            if not isinstance(weight.shown, Guarded)
        }
        for name, value in state.items():
            if name.startswith(prefix) and isinstance(value, torch.Tensor):
                state[name] = host.get(value.untyped_storage()._cdata, value)

    def _bring(self, numbers: list[int]) -> None:
        """Bring these layers to the card; the last one counts as most recently used."""
        absent = [number for number in numbers if number not in self._here]
        self._make_room(self.resident_layers - len(absent), keep=numbers)
        for number in absent:
            self._layers[number].fetch(self._side)
            self._here[number] = None
            self.num_fetched += 1
            self.fetched_bytes += self._layers[number].num_bytes
        for number in numbers:
            self._here.move_to_end(number)

    def _make_room(self, num_left: int, keep: Iterable[int] = ()) -> None:
        """Take layers off the card, least recently used first, until `num_left` remain."""
        for number in list(self._here):
            if len(self._here) <= num_left:
                return
            layer = self._layers[number]
            is_held = any(weight.is_held for weight in layer.weights)  # by other code
            if number not in keep and not (layer.is_written and is_held):
                del self._here[number]
                layer.drop()


class _Hook(functools.partial[None]):
    """Calls a method for one layer. In copies and pickles of the module it does nothing."""

    def __reduce__(self) -> tuple[type["_Hook"], tuple[Callable[..., None]]]:
        return _Hook, (_do_nothing,)


def _do_nothing(*_: object) -> None:
    pass


def _is_in_backward() -> bool:
    """Return whether autograd is running in this thread, including recomputation."""
    return torch._C._current_graph_task_id() != -1


@functools.cache
def _can_pin() -> bool:
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError as error:
        logger.warning(
            "main memory cannot be pinned here (%s), so copies to the card are slower: check"
            " ulimit -l",
            str(error).partition("\n")[0],
        )
        return False
    return True
