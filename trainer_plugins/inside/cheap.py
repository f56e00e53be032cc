"""Skips work that would only take time: initialisation, and writes to main memory.

Unwritten main memory is never allocated, so states of hundreds of GiB can be offloaded here.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from trainer_plugins.inside.process import has_numbers
from trainer_plugins.patched import Patches

_LARGE_BYTES = 1 << 20
_LARGE_WEIGHT_BYTES = 64 << 10
_aten: Any = torch.ops.aten
_FILL = {
    _aten.zero_, _aten.fill_, _aten.copy_, _aten.mul_, _aten._fused_adam_, _aten._fused_adamw_,
    _aten._fused_sgd_, _aten._foreach_copy_,
}  # fmt: skip
"""Operators that write numbers into CPU tensors."""

_MAKE = {
    _aten.zeros, _aten.zeros_like, _aten.new_zeros, _aten._to_copy, _aten.clone, _aten._pin_memory,
}  # fmt: skip
"""Operators that create CPU tensors with numbers in them."""

_QUANTISES = "bitsandbytes"
"""The namespace of operators that would spend minutes of CPU time on a base in main memory."""

_BASES = (torch.uint8, torch.int8)
"""Types of a quantised base; for other integers the written values matter."""

_empty = torch.empty  # before DeepSpeed's zero.Init replaces it


def skip_initialisation() -> None:
    """Make the functions of `torch.nn.init` skip tensors of 64 KiB and more."""

    def fill_if_small(fill: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        is_small = tensor.numel() * tensor.element_size() < _LARGE_WEIGHT_BYTES
        return fill(tensor, *args, **kwargs) if is_small else tensor

    for name in [*vars(torch.nn.init)]:
        if name.endswith("_") and not name.startswith("_"):
            Patches().wrap(torch.nn.init, name, fill_if_small)


def read_no_weights() -> None:
    """Make safetensors not read the first byte of a tensor, which reads MiB of its file ahead."""

    def get_part(get: Any, storage: Any, at: Any) -> Any:
        is_first = isinstance(at, int) and storage.device.type == "cpu"
        return 0 if is_first and storage.nbytes() >= _LARGE_BYTES else get(storage, at)

    Patches().wrap(torch.UntypedStorage, "__getitem__", get_part)


def skip_adam_of_the_processor() -> None:
    """Make DeepSpeed's CPU Adam compute nothing; its own code still creates the states."""
    if not has_numbers():
        module: Any = sys.modules["deepspeed.ops.adam.cpu_adam"]
        module.CPUAdamBuilder = _Builder


class _Builder:
    """Stands in for the compilation of DeepSpeed's Adam, which takes minutes."""

    def load(self) -> "_Builder":
        return self

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_, **__: 0


def on_processor(func: Any, given: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
    """Run a CPU operator, skipping writes to large tensors.

    `given` are the tensors among its arguments, none of them on a card.
    """
    if func.namespace == _QUANTISES:
        return _make_unfilled(func, args, kwargs)
    packet = func.overloadpacket
    if packet in _FILL and given and all(map(_is_large, given[:1])):
        return args[0] if func._schema.returns else None  # optimizers of lists return nothing
    if packet in _MAKE:
        made = _make_empty(packet, args, kwargs)
        if made is not None:
            return made
    return func(*args, **kwargs)


def _make_empty(packet: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """Return an operator's result with no numbers in it; None if it is small."""
    like = args[0] if args and isinstance(args[0], torch.Tensor) else None
    dtype = kwargs.get("dtype") or (like.dtype if like is not None else torch.get_default_dtype())
    shape = like.shape if like is not None else torch.Size(args[0])
    if packet is _aten.new_zeros:
        shape = torch.Size(args[1])
    device = torch.device(kwargs.get("device") or "cpu")
    if not _is_weights(dtype) or device.type != "cpu" or kwargs.get("layout"):
        return None
    if shape.numel() * dtype.itemsize < _LARGE_BYTES:
        return None
    is_pinned = packet is _aten._pin_memory or bool(kwargs.get("pin_memory"))
    return _empty(shape, dtype=dtype, device="cpu", pin_memory=is_pinned)


def _is_large(tensor: torch.Tensor) -> bool:
    return _is_weights(tensor.dtype) and tensor.numel() * tensor.element_size() >= _LARGE_BYTES


def _is_weights(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype in _BASES


def _make_unfilled(func: Any, args: Any, kwargs: Any) -> Any:
    with _disable_current_modes():
        args, kwargs = tree_map_only(torch.Tensor, lambda each: each.to("meta"), (args, kwargs))
        made = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda each: _empty(each.shape, dtype=each.dtype), made)
