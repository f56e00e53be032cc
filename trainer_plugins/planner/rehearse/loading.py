"""Asks transformers 5's own loader how a checkpoint holds a model's weights. Imports torch."""

import inspect
from typing import Any

import torch

_LOADER_TAKES = ["model", "state_dict", "load_config", "disk_offload_index"]


def in_file(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights as a checkpoint has them."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, torch.Tensor] = revert_weight_conversion(model, weights)
    return found


def has_loader() -> bool:
    """Return whether transformers has the loader that is run here: 5.23 has it, 4 has none."""
    try:
        from transformers.core_model_loading import convert_and_load_state_dict_in_model as loader
    except ImportError:
        return False
    return [*inspect.signature(loader).parameters] == _LOADER_TAKES
