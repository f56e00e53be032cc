"""FSDP2: torch's `FSDPModule`, whose units count their collectives."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.patched import Patches
from trainer_plugins.survival.ranks.sharded import Ledger, Sharded


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
            unit.set_custom_all_gather(_Counted(group._all_gather_comm, self._ledger))
            unit.set_custom_reduce_scatter(_Counted(group._reduce_scatter_comm, self._ledger))

    @classmethod
    def refusals(cls, trainer: HfTrainer) -> Iterator[str]:
        if not hasattr(FSDPModule, "reset_iter_state"):
            yield f"FSDP 2 of torch {torch.__version__} has no reset_iter_state: use 2.13 or newer"

    def end(self) -> None:
        for unit, group in self._groups():
            if isinstance(group._all_gather_comm, _Counted):
                unit.set_custom_all_gather(group._all_gather_comm.collective)
                unit.set_custom_reduce_scatter(group._reduce_scatter_comm.collective)

    def _listing(self) -> Patches:
        patches = Patches()
        patches.wrap(DTensor, "full_tensor", self._full_tensor)
        return patches

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

    def _full_tensor(
        self, original: Callable[..., torch.Tensor], shard: DTensor, **options: object
    ) -> torch.Tensor:
        """Do as `DTensor.full_tensor`, which TRL calls on PEFT's head, and list the gather."""
        if tuple(shard.placements) != (Shard(0),) or options:
            return original(shard, **options)
        # By hand: the original does not show whether an error came before the exchange.
        local, num = shard.to_local().detach(), shard.device_mesh.size()
        part = local.new_zeros(-(-len(shard) // num), *shard.shape[1:])
        part[: len(local)] = local
        whole = part.new_empty(num * len(part), *shard.shape[1:])
        if self._ledger.is_sent(shard):
            whole.zero_()
        else:
            dist.all_gather_into_tensor(whole, part, group=shard.device_mesh.get_group())
        whole = whole[: len(shard)]
        found: torch.Tensor = _Whole.apply(shard, whole)  # type: ignore[no-untyped-call]
        return found


class _Counted:
    """Lists an all-gather or reduce-scatter of FSDP; one that is not sent again returns zeros."""

    def __init__(self, collective: Any, ledger: Ledger) -> None:
        self.collective, self._ledger = collective, ledger
        self.allocate = collective.allocate

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **kwargs: object
    ) -> object:
        if self._ledger.is_sent(self):
            output_tensor.zero_()
            return None
        if "op" in kwargs and self._ledger.reduced is not None:
            self._ledger.reduced.append(input_tensor.cpu().double())
        return self.collective(output_tensor=output_tensor, input_tensor=input_tensor, **kwargs)


class _Whole(torch.autograd.Function):
    """Gives each rank its part of the gradient of a whole, as `DTensor.full_tensor` does."""

    @staticmethod
    def forward(ctx: Any, shard: DTensor, whole: torch.Tensor) -> torch.Tensor:
        ctx.mesh, ctx.placements = shard.device_mesh, shard.placements
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[DTensor, None]:
        part = distribute_tensor(gradient, ctx.mesh, ctx.placements, src_data_rank=None)
        return part, None
