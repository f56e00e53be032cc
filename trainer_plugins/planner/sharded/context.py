"""Divide the tokens of each row among cards: accelerate's `cp_size`. Imports torch.

accelerate and torch's own ring attention do it (torch.distributed.tensor.experimental); here it is
only checked that they can. The first card has the most: while it merges what it has found with what
it finds in the keys of others, it keeps both parts of its queries.
"""

from collections.abc import Mapping
from typing import Any
from unittest.mock import _patch, patch

import torch

from trainer_plugins.planner.plan import NotPredicted
from trainer_plugins.planner.request import PlanRequest
from trainer_plugins.planner.trainer import Arguments

NOT_RELIABLE = (
    "context parallelism: torch's own ring attention with flash's kernel; checked on simulated "
    "cards, not on a GPU"
)
_EXPORTED = "PARALLELISM_CONFIG_"


def sizes_of(request: PlanRequest, args: Arguments) -> Mapping[str, object]:
    """Return the fields of accelerate's ParallelismConfig that end in `_size`, among others.

    They are from the arguments, or from what a launcher exported.
    """
    if (config := getattr(args, "parallelism_config", None)) is not None:
        return vars(config)
    if request.environment.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() != "true":
        return {}
    return {
        name.removeprefix(_EXPORTED).lower(): int(value)
        for name, value in request.environment.items()
        if name.startswith(_EXPORTED) and name.endswith("_SIZE")
    }


def cards_of_a_row(request: PlanRequest, args: Arguments) -> int:
    """Return among how many cards the tokens of a row are divided."""
    size = sizes_of(request, args).get("cp_size")
    return size if isinstance(size, int) else 1


def rows_are_divisible() -> "_patch[Any]":
    """Refuse rows that cannot be divided evenly.

    Each card gets two parts of a row, one from either end, so that all compute as much. If that
    does not come out even, torch either divides without a balance, and the last card has the most,
    or fails.
    """
    from accelerate import Accelerator

    original = Accelerator.maybe_context_parallel

    def divided(
        accelerator: Any,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        **more: Any,
    ) -> Any:
        parts = 2 * accelerator.parallelism_config.cp_size
        for tensor, dim in zip(buffers or (), buffer_seq_dims or (), strict=True):
            if tensor.shape[dim] % parts:
                raise NotPredicted(
                    f"context parallelism with rows of {tensor.shape[dim]} tokens, which are not "
                    f"{parts} equal parts; pad them (pad_to_multiple_of {parts})"
                )
        return original(accelerator, buffers, buffer_seq_dims, **more)

    return patch.object(Accelerator, "maybe_context_parallel", divided)
