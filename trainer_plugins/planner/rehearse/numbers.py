"""Send the numbers of a batch by which a model cuts its tensors, and write them down again.

Everything else of a batch is sent without bytes. Imports torch.
"""

from dataclasses import dataclass
from typing import Any

import torch

from trainer_plugins.planner.tracing.values import NOTHING, Asked

_SIZES = ("image_grid_thw", "video_grid_thw", "image_sizes")
_CUT_BY = (*_SIZES, "mm_token_type_ids", "input_ids", "attention_mask")


@dataclass(frozen=True, slots=True)
class Numbers:
    """Holds the values of a tensor of whole numbers, as nested lists."""

    values: list[Any]


def with_numbers(batch: object) -> object:
    """Return a batch with `Numbers` in place of the tensors that hold sizes of pictures."""
    if not any(isinstance(_of(batch, name), torch.Tensor) for name in _SIZES):
        return batch
    found: Any = batch
    return {
        name: Numbers(each.tolist()) if name in _CUT_BY else each for name, each in found.items()
    }


def copied(batch: Any) -> Any:
    """Copy a batch, as a collator makes a new one each time, and write its numbers down."""
    if isinstance(batch, torch.Tensor):
        return torch.empty_like(batch)
    if isinstance(batch, Numbers):
        return torch.tensor(batch.values)
    if isinstance(batch, dict):
        return {name: copied(each) for name, each in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(copied(each) for each in batch)
    return batch


def asked_of(batch: object) -> Asked:
    """Return what a model asks of the numbers in a batch."""
    if any(isinstance(_of(batch, name), Numbers) for name in _SIZES):
        return Asked(are_kept=True)
    pictures = _of(batch, "pixel_values")
    if isinstance(pictures, torch.Tensor) and pictures.ndim == 5:
        return Asked(count=pictures.shape[1])  # Idefics counts those of a row that are no padding
    return NOTHING


def _of(batch: object, name: str) -> object:
    return batch.get(name) if hasattr(batch, "get") else None
