"""Run either version of FSDP, on tensors without bytes: what both need. Imports torch."""

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, TypeAlias

import torch

from trainer_plugins.planner.plan import NotPredicted
from trainer_plugins.planner.pretend.eight_bit import OPTIMIZERS
from trainer_plugins.planner.pretend.optimizers import PACKAGES
from trainer_plugins.planner.request import PlanRequest
from trainer_plugins.planner.sharded.ranks import OF_NCCL, as_first_rank
from trainer_plugins.planner.tracing.trace import Tracker
from trainer_plugins.planner.trainer import TrainerLike, optimizer_name

# transformers/integrations/fsdp.py, is_fsdp_enabled: if both are true, only the first rank of a
# node loads the weights.
_ONE_LOADS = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
_TRUE = ("1", "true", "yes", "y", "on", "t")

Patch: TypeAlias = contextlib.AbstractContextManager[object]


class Fsdp(ABC):
    """Divides weights, gradients and optimizer states among the cards; gathers them by layer."""

    name: ClassVar[str]
    not_predicted: tuple[str, ...] = (OF_NCCL,)
    not_reliable: tuple[str, ...]

    def __init__(self, request: PlanRequest) -> None:
        self._request = request

    @abstractmethod
    def patches(self, tracker: Tracker) -> Iterator[Patch]:
        """Yield what has to be replaced, in this order, so that FSDP runs and is understood."""

    @contextlib.contextmanager
    def around(self, tracker: Tracker) -> Iterator[None]:
        self._tracker = tracker
        with as_first_rank(self._request, tracker) as stack:
            self._num_local = tracker.host.ranks
            if _loads_once():
                tracker.host.ranks = 1
            for each in self.patches(tracker):
                stack.enter_context(each)
            yield

    def prepare(self, trainer: TrainerLike) -> None:
        refuse_optimizers(trainer, self.name)
        self._tracker.host.ranks = self._num_local


def refuse_optimizers(trainer: TrainerLike, by: str) -> None:
    """Refuse all optimizers but torch's own.

    Raises:
        NotPredicted: its states are of another package.
    """
    optimizer = optimizer_name(trainer.args)
    if optimizer in OPTIMIZERS:
        raise NotPredicted(f"an optimizer of bitsandbytes ({optimizer}) under {by}")
    if optimizer in PACKAGES:
        raise NotPredicted(f"the optimizer {optimizer} under {by}")


def address(tensor: torch.Tensor) -> int:
    """Return a number that only tensors share whose elements begin at one place."""
    return int(tensor.untyped_storage()._cdata) + int(tensor.storage_offset())


def _loads_once() -> bool:
    """Return whether only the first rank of a node loads the weights."""
    return all(os.environ.get(name, "").lower() in _TRUE for name in _ONE_LOADS)
