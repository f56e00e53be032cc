"""Shapes that depend on values: computes `nonzero`, `unique` and the like on the host.

We replace their CUDA kernels, so this works wherever torch calls them, such as when indexing by a
mask. Large tensors have no values: they count as zero, and the call is counted by name. Generated
text has its maximum length: the model chooses none of its tokens.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from trainer_plugins.inside.process import has_numbers
from trainer_plugins.inside.values import alias, has_values

_zeros, _empty_like = torch.zeros, torch.empty_like  # before DeepSpeed's zero.Init replaces them
unknown: Counter[str] = Counter()
"""By operator, how often a shape came from values that were not computed."""

_OPERATORS = (
    "nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "bincount",
    "repeat_interleave.Tensor",
)  # fmt: skip
_DECIDES = {"masked_select": 1}
"""Index of the argument that determines the shape, if not the first."""

_library: Any = None


def compute_on_the_host() -> None:
    """Replace the kernels in this process."""
    global _library
    _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in _OPERATORS:
        _library.impl(name, _compute_shape(name), "CUDA", allow_override=True)


def _compute_shape(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def run(*args: Any, **kwargs: Any) -> Any:
        if not has_values(args[_DECIDES.get(name, 0)]):
            unknown[name] += 1
        given = list(map(_on_host, args))
        made = operator(*given, **kwargs)
        if isinstance(made, tuple):
            return tuple(map(_on_card, made))
        return _on_card(made)

    return run


def _on_host(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        return value
    if has_values(value):
        return alias(value)
    return _zeros((), dtype=value.dtype, device="cpu").expand(value.shape)


def _on_card(tensor: torch.Tensor) -> torch.Tensor:
    own = _empty_like(tensor, device="cuda")
    if own.numel():
        alias(own).copy_(tensor)
    return own


def generate_to_the_end() -> None:
    """Keep end tokens from ending generation, unless the model really chooses them."""
    if has_numbers():
        return
    from transformers.generation import stopping_criteria

    def never(self: object, input_ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return _zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    stopping_criteria.EosTokenCriteria.__call__ = never
