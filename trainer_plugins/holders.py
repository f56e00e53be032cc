"""Holders: which tensors are alive on a device without being the model's or the optimizer's, and who holds them."""

import gc
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import nn

_MAX_LINKS = 6


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor, and the way to it from something with a name."""

    num_bytes: int
    shape: tuple[int, ...]
    holder: str
    """As one would write it: `MyCallback.outputs[0] -> DynamicCache.layers[0]`."""


def tensors_held(
    device_type: str, model: nn.Module | None, optimizer: torch.optim.Optimizer | None, largest: int = 3
) -> list[Held]:
    """The largest tensors on a device that neither the model nor its optimizer owns, with their holders.

    Costs a walk through every object that Python tracks: 0.1 to 1 s. For the case that memory did not come back.
    """
    owned = {id(tensor) for tensor in _owned(model, optimizer)}
    found: dict[int, torch.Tensor] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == device_type and id(thing) not in owned:
            found.setdefault(thing.untyped_storage().data_ptr(), thing)
    ranked = sorted(found.values(), key=lambda tensor: tensor.untyped_storage().nbytes(), reverse=True)[:largest]
    found.clear()
    return [
        Held(num_bytes=tensor.untyped_storage().nbytes(), shape=tuple(tensor.shape), holder=_holder(tensor, ranked))
        for tensor in ranked
    ]


def _owned(model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> Iterable[torch.Tensor]:
    if model is not None:
        for tensor in (*model.parameters(), *model.buffers()):
            yield tensor
            if tensor.grad is not None:
                yield tensor.grad
    # An optimizer wrapped by accelerate keeps the states of the one inside.
    for state in getattr(optimizer, "state", {}).values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _holder(thing: object, ours: object) -> str:
    """Climb from a thing to what refers to it, until something has a name of its own."""
    links: list[str] = []
    seen = {id(ours), id(thing)}
    while len(links) < _MAX_LINKS:
        link = _link_to(thing, seen)
        if link is None:
            break
        thing, text = link
        seen.add(id(thing))
        links.append(text)
        if isinstance(thing, ModuleType | FrameType):
            break
    return " -> ".join(reversed(links)) if links else "nothing that Python tracks (autograd's graph, or C++)"


def _link_to(thing: object, seen: set[int]) -> tuple[Any, str] | None:
    """One thing that refers to another, and the name by which it does. Frames last: they name a passing moment."""
    frames: list[FrameType] = []
    for referrer in gc.get_referrers(thing):
        if id(referrer) in seen or referrer is sys._getframe() or referrer is sys._getframe(1):
            continue
        if isinstance(referrer, FrameType):
            frames.append(referrer)
        elif isinstance(referrer, dict):
            key = next((key for key, value in referrer.items() if value is thing), None)
            owner = _owner_of_dict(referrer, seen)
            if isinstance(owner, ModuleType):
                return owner, f"{owner.__name__}.{key}"
            if owner is not None:
                return owner, f"{type(owner).__name__}.{key}"
            return referrer, f"[{key!r}]"
        elif isinstance(referrer, list | tuple):
            index = next((i for i, value in enumerate(referrer) if value is thing), None)
            if index is not None:
                return referrer, f"[{index}]"
        elif hasattr(type(referrer), "__slots__") or isinstance(referrer, set):
            return referrer, type(referrer).__name__
    for frame in frames:
        if frame.f_code.co_filename != __file__ and frame.f_code.co_name not in ("tensors_held",):
            return frame, f"a local of {frame.f_code.co_name}()"
    return None


def _owner_of_dict(names: dict[Any, Any], seen: set[int]) -> Any:
    """The object or module whose attributes a dictionary holds."""
    for owner in gc.get_referrers(names):
        if id(owner) not in seen and getattr(owner, "__dict__", None) is names:
            return owner
    return None
