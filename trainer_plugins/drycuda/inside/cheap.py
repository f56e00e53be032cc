"""Initialisation costs nothing: random numbers of large tensors are not drawn."""

import functools
from collections.abc import Callable
from typing import Any

import torch

_LARGE_BYTES = 1 << 20
_FUNCTIONS = (
    "uniform_", "normal_", "constant_", "ones_", "zeros_", "eye_", "dirac_", "xavier_uniform_",
    "xavier_normal_", "kaiming_uniform_", "kaiming_normal_", "trunc_normal_", "orthogonal_",
    "sparse_",
)  # fmt: skip


def skip_initialisation() -> None:
    """Replace the functions of `torch.nn.init`, for tensors of 1 MiB and more."""
    for name in _FUNCTIONS:
        setattr(torch.nn.init, name, _only_if_small(getattr(torch.nn.init, name)))


def _only_if_small(fill: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fill)
    def filled(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.numel() * tensor.element_size() >= _LARGE_BYTES:
            return tensor
        return fill(tensor, *args, **kwargs)

    return filled
