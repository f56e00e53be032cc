"""The ladder: measures that save memory without changing results, for when no piece fits."""

import logging
from contextlib import ExitStack

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from trainer_plugins.checkpointing import is_checkpointing, switch_off, switch_on
from trainer_plugins.streaming.attach import main_memory_lacks, model_refusals, report_begin
from trainer_plugins.streaming.stream import Stream, stream_of
from trainer_plugins.survival.attempt.attempt import DidNotFit, attempt
from trainer_plugins.survival.attempt.generators import draw_the_same_again
from trainer_plugins.wrapped import base_model, compiles

logger = logging.getLogger(__name__)

CHECKPOINTING, OFFLOAD = "checkpointing", "offload"
RUNGS = (CHECKPOINTING, OFFLOAD)  # default rungs

STREAM = "stream"  # only if named: with it each micro-batch copies the frozen base

RESIDENT_LAYERS = 2  # layers of a streamed base that stay on the card

_OFFLOAD = "_activations_on_the_host"  # attribute of a model that keeps its `Offload`


def climb(rung: str, model: nn.Module) -> bool:
    """Switch a rung on; return False if it is on already or the model lacks it."""
    if rung == STREAM:
        return _stream(model)
    base = base_model(model)
    if rung == OFFLOAD:
        if hasattr(base, _OFFLOAD) or not Offload.is_possible(base):
            return False
        setattr(base, _OFFLOAD, Offload(base))
        return True
    if is_checkpointing(model) or not getattr(base, "supports_gradient_checkpointing", False):
        return False
    # torch.compile accepts no such contexts: it draws these numbers once, while compiling.
    again = {} if compiles(model) else {"context_fn": draw_the_same_again}
    switch_on(base, {"use_reentrant": False, **again})
    return True


def descend(rung: str, model: nn.Module) -> None:
    """Switch a rung off again; a base that does not fit on the card stays streamed."""
    base = base_model(model)
    if rung == STREAM:
        stream = stream_of(model)
        failed = attempt(stream.remove) if stream is not None else None
        if isinstance(failed, DidNotFit):
            logger.warning("the base stays in main memory: %s", failed.first_line)
        return
    if rung == OFFLOAD:
        vars(base).pop(_OFFLOAD).close()
        return
    switch_off(base)


def _stream(model: nn.Module) -> bool:
    device = next(model.parameters()).device
    if device.type == "cpu" or list(model_refusals(model, RESIDENT_LAYERS)):
        return False
    if main_memory_lacks(model, device):
        return False
    stream = Stream(model, device, RESIDENT_LAYERS)
    logger.warning("%s", report_begin(stream, "the smallest piece of a micro-batch did not fit"))
    return True


# A tensor that stays in place, or its device and its copy in main memory.
_Packed = torch.Tensor | tuple[torch.device, torch.Tensor]


class Offload(ExitStack):
    """Keeps the activations of one model in main memory, from its next forward pass on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._entered: list[saved_tensors_hooks] = []
        self._weights: set[int] = set()
        self.enter_context(model.register_forward_pre_hook(self._enter))
        # also called after a pass that fails
        self.enter_context(model.register_forward_hook(self._leave, always_call=True))

    @staticmethod
    def is_possible(model: nn.Module) -> bool:
        """Return whether the model is on a card and not sharded: shards look like activations."""
        return all(
            one.device.type not in ("cpu", "meta")
            and not hasattr(one, "_local_tensor")
            and not hasattr(one, "ds_id")
            for one in model.parameters()
        )

    def _enter(self, model: nn.Module, _: object) -> None:
        self._weights = {_storage(one) for one in (*model.parameters(), *model.buffers())}
        hooks = saved_tensors_hooks(self._pack, _unpack)
        hooks.__enter__()
        self._entered.append(hooks)

    def _leave(self, *_: object) -> None:
        self._entered.pop().__exit__()

    def _pack(self, tensor: torch.Tensor) -> _Packed:
        if tensor.device.type == "cpu" or _storage(tensor) in self._weights:
            return tensor
        return tensor.device, tensor.to("cpu")


def _unpack(packed: _Packed) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    device, tensor = packed
    return tensor.to(device)


def _storage(tensor: torch.Tensor) -> int:
    # not the address of its bytes, which changes if the base is streamed
    return int(tensor.untyped_storage()._cdata)
