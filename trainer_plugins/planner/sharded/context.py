"""Divide the tokens of each row among cards: accelerate's `cp_size`. Imports torch.

accelerate and torch's own ring attention do it (torch.distributed.tensor.experimental). Of each row
a card has two parts, one from either end, so that all compute as much. The first card needs the
most: it looks for half of its queries in the keys of others, and puts what it finds into a copy.
"""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator

from trainer_plugins.planner.plan import NotPredicted
from trainer_plugins.planner.sharded.fsdp import Patch
from trainer_plugins.planner.sharded.fsdp2 import Fsdp2
from trainer_plugins.planner.tracing.trace import Tracker

_PARTS_OF_A_CARD = 2


class ContextParallel(Fsdp2):
    """Divides each row among cards, and also weights, gradients and optimizer states."""

    not_reliable: tuple[str, ...] = (
        *Fsdp2.not_reliable,
        "context parallelism: torch's own ring of flash attention; checked on simulated cards, and "
        "not by us on a GPU",
    )

    def patches(self, tracker: Tracker) -> Iterator[Patch]:
        yield from super().patches(tracker)
        divide: Any = Accelerator.maybe_context_parallel

        def divided(
            accelerator: Any, buffers: list[torch.Tensor], buffer_seq_dims: list[int], **more: Any
        ) -> Any:
            for tensor, dim in zip(buffers, buffer_seq_dims, strict=True):
                _check_length(tensor.shape[dim], accelerator.parallelism_config.cp_size)
            return divide(accelerator, buffers, buffer_seq_dims, **more)

        yield patch.object(Accelerator, "maybe_context_parallel", divided)


def _check_length(length: int, num_cards: int) -> None:
    """Refuse rows that torch divides without a balance, or not at all.

    Without a balance, the last card needs the most: it looks for all its queries in all keys.

    Raises:
        NotPredicted: the parts of a row would not be equal.
    """
    parts = _PARTS_OF_A_CARD * num_cards
    if length % parts:
        raise NotPredicted(
            f"context parallelism of rows of {length} tokens, which are not {parts} equal parts: "
            f"pad them (pad_to_multiple_of {parts})"
        )
