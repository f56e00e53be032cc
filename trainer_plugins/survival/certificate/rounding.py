"""Rounding: compute a pass with every number rounded anew, to see what rounding makes of it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_GOLDEN = 0.6180339887498949
"""Its multiples are spread evenly over [0, 1), so half of the signs are up and half are down."""


@contextmanager
def rounded_anew(model: nn.Module) -> Iterator[None]:
    """Move what each innermost module returns by its last digit, up or down.

    A gradient that changes by as much as it is large is nothing but rounding. Nothing is drawn, so
    checkpointing computes the same numbers again.
    """
    hooks = [
        module.register_forward_hook(_move)
        for module in model.modules()
        if next(module.children(), None) is None
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _move(_: nn.Module, __: object, output: object) -> object:
    if not torch.is_tensor(output) or not output.is_floating_point() or not output.dim():
        return output
    *places, size = output.shape
    signs = _signs(math.prod(places), output).reshape(*places, 1) * _signs(size, output)
    return output * (1 + torch.finfo(output.dtype).eps * signs)


def _signs(num: int, like: torch.Tensor) -> torch.Tensor:
    places = torch.arange(1, num + 1, device=like.device, dtype=torch.float64)
    return (1 - 2 * ((places * _GOLDEN).frac() < 0.5)).to(like.dtype)
