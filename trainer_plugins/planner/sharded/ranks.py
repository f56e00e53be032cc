"""Be the first rank of many, which holds the most, in one process: torch's fake process group."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, UnsupportedOperatorException
from torch.utils._python_dispatch import _disable_current_modes

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.patched import Patches
from trainer_plugins.planner.kind import text_of
from trainer_plugins.planner.one_card import OneCard
from trainer_plugins.planner.plan import NotPredicted
from trainer_plugins.planner.pretend.as_on_card import forget_accelerate
from trainer_plugins.planner.pretend.eight_bit import OPTIMIZERS
from trainer_plugins.planner.pretend.optimizers import PACKAGES
from trainer_plugins.planner.request import PlanRequest
from trainer_plugins.planner.tracing.trace import Tracker


class Ranks(OneCard):
    """Runs as the first of several ranks."""

    not_predicted: tuple[str, ...] = ("memory of NCCL's communicators, outside torch's allocator",)

    def __init__(self, request: PlanRequest) -> None:
        self.request = request

    def patch(self, patches: Patches, tracker: Tracker) -> None:
        """Replace what has to be replaced so that this strategy runs and is understood."""

    @contextlib.contextmanager
    def around(self, tracker: Tracker) -> Iterator[None]:
        with Patches() as patches:
            _be_first_rank(patches, self.request, tracker)
            self.patch(patches, tracker)
            tracker.not_watched += tuple(patches.missing)
            yield


def _be_first_rank(patches: Patches, request: PlanRequest, tracker: Tracker) -> None:
    """Let torch, accelerate and transformers find a launched process."""
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
    with _disable_current_modes():
        dist.init_process_group("fake", rank=0, world_size=request.num_gpus, store=FakeStore())
    patches.callback(forget_accelerate)
    patches.callback(dist.destroy_process_group)
    card: Any = getattr(torch, tracker.device)
    if tracker.device == "cuda":
        patches.set(torch.accelerator, "current_stream", card.current_stream)
    patches.set(card, "device_count", lambda: num_local)
    # One of the two ways to ask for the accelerator looks at how torch was built.
    patches.set(torch._C, "_get_accelerator", lambda *_: torch.device(tracker.device))
    patches.set(dist, "barrier", _do_nothing)
    # The first rank keeps what it sends. It would send tensors without bytes.
    patches.set(dist, "broadcast_object_list", _do_nothing)
    patches.set(dist, "all_gather_object", _all_have_the_same)
    # All ranks have batches of the same size. Comparing sizes would need values.
    patches.set(Accelerator, "pad_across_processes", lambda self, tensor, *_, **__: tensor)
    try:
        with tracker.resting():  # it is ours, not the run's
            dist.broadcast(torch.empty(1, device=tracker.device), 0)
    except UnsupportedOperatorException as error:
        raise NotPredicted(
            f"several GPUs with torch {torch.__version__}: its collectives take no fake tensors"
        ) from error


def _do_nothing(*_: object, **__: object) -> None:
    pass


def _all_have_the_same(gathered: list[object], own: object, *_: object, **__: object) -> None:
    gathered[:] = [own] * len(gathered)


def refuse_optimizers(trainer: HfTrainer, by: str) -> None:
    """Refuse all optimizers but torch's own."""
    optimizer = text_of(trainer.args.optim)
    if optimizer in OPTIMIZERS:
        raise NotPredicted(f"an optimizer of bitsandbytes ({optimizer}) under {by}")
    if optimizer in PACKAGES:
        raise NotPredicted(f"the optimizer {optimizer} under {by}")


def makes_buffers(patches: Patches, tracker: Tracker, owner: Any, name: str) -> None:
    """Give the category of sharding buffers to all that a function makes."""
    patches.surround(owner, name, lambda: tracker.as_category("sharding buffers"))


@contextlib.contextmanager
def addresses_are(address_of: Callable[[Any], int]) -> Iterator[None]:
    """Let fake tensors have this address inside the block."""
    with Patches() as patches:
        patches.set(FakeTensor, "data_ptr", address_of)
        yield


def address(tensor: torch.Tensor) -> int:
    """Return a number that only tensors share whose elements begin at one place."""
    return int(tensor.untyped_storage()._cdata) + int(tensor.storage_offset())
