"""Be one rank of many in one process: the first rank, which holds the most. Imports torch.

The process group is torch's own fake one: each collective returns at once, with results of the
right shapes. All else (DDP, FSDP2, accelerate, the Trainer) is the real code.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.utils._python_dispatch import _disable_current_modes

from trainer_plugins.planner.plan import NotPredicted
from trainer_plugins.planner.request import PlanRequest
from trainer_plugins.planner.tracing.trace import Tracker

OF_NCCL = "memory of NCCL's communicators, outside torch's allocator"


@contextlib.contextmanager
def as_first_rank(request: PlanRequest, tracker: Tracker) -> Iterator[contextlib.ExitStack]:
    """Let torch, accelerate and transformers find a launched process.

    Yields a stack for further patches, which are removed at the end of the block.

    Raises:
        NotPredicted: this torch's collectives take no fake tensors.
    """
    from accelerate import Accelerator
    from torch.testing._internal.distributed.fake_pg import FakeStore

    num_local = request.gpus_per_node
    os.environ.update(
        {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "GROUP_RANK": "0",
            "LOCAL_WORLD_SIZE": str(num_local),
            "WORLD_SIZE": str(request.num_gpus),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29500",
        }
    )  # restored after each prediction
    # accelerate's state is from arguments that were read before there were ranks
    forget_accelerate()
    tracker.host.ranks = num_local
    with contextlib.ExitStack() as stack:
        with _disable_current_modes():
            dist.init_process_group("fake", rank=0, world_size=request.num_gpus, store=FakeStore())
        stack.callback(forget_accelerate)
        stack.callback(dist.destroy_process_group)
        card: Any = getattr(torch, tracker.device)
        if tracker.device == "cuda":
            current = card.current_stream
            stack.enter_context(patch.object(torch.accelerator, "current_stream", current))
        stack.enter_context(patch.object(card, "device_count", lambda: num_local))
        # One of the two ways to ask for the accelerator looks at how torch was built.
        stack.enter_context(
            patch.object(torch._C, "_get_accelerator", lambda *_: torch.device(tracker.device))
        )
        stack.enter_context(patch.object(dist, "barrier", lambda *_, **__: None))
        # The first rank keeps what it sends. It would send tensors without bytes.
        stack.enter_context(patch.object(dist, "broadcast_object_list", lambda *_, **__: None))
        stack.enter_context(patch.object(dist, "all_gather_object", _all_have_the_same))
        # All ranks have batches of the same size. Comparing sizes would need values.
        stack.enter_context(
            patch.object(Accelerator, "pad_across_processes", lambda self, tensor, *_, **__: tensor)
        )
        _prove(tracker.device)
        yield stack


def _all_have_the_same(gathered: list[object], own: object, *_: object, **__: object) -> None:
    gathered[:] = [own] * len(gathered)


def _prove(device: str) -> None:
    try:
        dist.broadcast(torch.empty(1, device=device), 0)
    except UnsupportedOperatorException as error:
        raise NotPredicted(
            f"several GPUs with torch {torch.__version__}: its collectives take no fake tensors"
        ) from error


def forget_accelerate() -> None:
    """Reset accelerate's state: a process has one, and each prediction is another run."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
