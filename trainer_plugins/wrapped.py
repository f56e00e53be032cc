"""Unwrap a model, a DTensor's local part, or nested tensors."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def base_model(model: Any) -> Any:
    """Return the model inside its wrappers, PEFT's too, or the model itself."""
    model = unwrap(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def unwrap(model: Any) -> Any:
    """Return the model inside the wrappers of torch.compile and FSDP1, or the model itself."""
    for wrapper in ("_orig_mod", "_fsdp_wrapped_module"):
        model = getattr(model, wrapper, model)
    return model


def is_compiled(model: Any) -> bool:
    """Return whether torch.compile computes a model, or one of its modules."""
    return any(hasattr(m, "_orig_mod") or m._compiled_call_impl for m in model.modules())


def will_be_compiled() -> bool:
    """Return whether accelerate passes this process's models to torch.compile."""
    from accelerate.state import AcceleratorState, is_initialized

    backend = str(AcceleratorState().dynamo_plugin.backend) if is_initialized() else "NO"
    return backend.rpartition(".")[2] != "NO"


def compiles(model: Any) -> bool:
    """Return whether torch.compile computes a model, or will once accelerate has wrapped it."""
    return will_be_compiled() or is_compiled(model)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or the tensor itself."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield a tensor, or those in lists, tuples and mappings, however nested."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(each)
