"""Returns what is inside a wrapper: PEFT's around a model, DTensor around this rank's part."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def base_model(model: Any) -> Any:
    """Return the model inside PEFT's wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def local_tensor(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return the part of a DTensor that this rank holds, or the tensor itself."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local
