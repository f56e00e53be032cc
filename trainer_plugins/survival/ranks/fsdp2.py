"""FSDP2: torch's `FSDPModule`, whose units count their collectives."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.survival.ranks.ledger import Counted
from trainer_plugins.survival.ranks.sharded import Sharded


class FSDP2(Sharded):
    """Handles ranks whose parameters are DTensors."""

    wrapper = FSDPModule
    model: Any  # an `FSDPModule`; before torch 2.13 it lacks methods that we call

    def __init__(self, trainer: HfTrainer, model: nn.Module) -> None:
        super().__init__(trainer, model)
        # Several modules may share a gather: accelerate wraps the last norm and the head together.
        units: dict[int, Any] = {
            id(m._get_fsdp_state()): m
            for root in self._roots
            for m in root.modules()
            if isinstance(m, FSDPModule)
        }
        self._units = list(units.values())
        self._reshard()
        for unit, group in self._groups():
            unit.set_custom_all_gather(Counted(group._all_gather_comm, self._ledger))
            unit.set_custom_reduce_scatter(Counted(group._reduce_scatter_comm, self._ledger))

    @classmethod
    def refusals(cls, trainer: HfTrainer) -> Iterator[str]:
        if not hasattr(FSDPModule, "reset_iter_state"):
            yield f"FSDP 2 of torch {torch.__version__} has no reset_iter_state: use 2.13 or newer"

    def end(self) -> None:
        for unit, group in self._groups():
            if isinstance(group._all_gather_comm, Counted):
                unit.set_custom_all_gather(group._all_gather_comm.collective)
                unit.set_custom_reduce_scatter(group._reduce_scatter_comm.collective)

    def _listing(self) -> AbstractContextManager[object]:
        return self._ledger.listing_wholes()

    def _num_gathers(self) -> int:
        return len(list(self._groups()))

    def _forget_pass(self) -> None:
        for root in self._roots:
            if root._get_fsdp_state()._is_root is not None:  # it has run a forward pass
                root.reset_iter_state()

    def _reshard(self) -> None:
        for unit in self._units:
            unit.reshard()

    def _reduce_each(self, is_on: bool) -> None:
        self.model.set_requires_gradient_sync(is_on)

    def _groups(self) -> Iterator[tuple[Any, Any]]:
        for unit in self._units:
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                yield unit, group
