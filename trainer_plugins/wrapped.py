"""Returns what is inside: a model in its wrappers, a DTensor's local part, nested tensors."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def base_model(model: Any) -> Any:
    """Return the model inside PEFT's wrapper and FSDP1's, or the model itself."""
    model = without_fsdp1(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def without_fsdp1(model: Any) -> Any:
    """Return the model inside the wrapper of FSDP1, or the model itself."""
    return getattr(model, "_fsdp_wrapped_module", model)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a DTensor that this rank holds, or the tensor itself."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield a tensor, or those in lists, tuples and mappings, however these are nested."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
