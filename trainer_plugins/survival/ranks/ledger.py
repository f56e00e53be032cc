"""Ledger: records what a rank sent in an FSDP pass; after a failure it sends only the rest."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainer_plugins.patched import Patches


class Ledger:
    """Lists the collectives in which this rank has taken part since a micro-batch began."""

    def __init__(self) -> None:
        self._sent: list[object] = []
        self._next = 0
        self.fail_at: int | None = None  # for a test: collectives before one fails
        self.reduced: list[torch.Tensor] | None = None  # this rank's contributions, if collected

    def clear(self) -> None:
        self._sent.clear()
        self._next = 0

    def rewind(self) -> None:
        self._next = 0

    def is_sent(self, collective: object) -> bool:
        """Return whether the failed pass sent the next collective already; if not, list it."""
        is_sent = self._next < len(self._sent)
        if is_sent and self._sent[self._next] is not collective:
            raise RuntimeError(
                "survive_oom cannot finish the collectives of this rank: a short micro-batch has "
                "them in another order. Training stops here; detach survive_oom for this model"
            )
        if not is_sent:
            if len(self._sent) == self.fail_at:
                raise torch.OutOfMemoryError("CUDA out of memory, to try what it leaves")
            self._sent.append(collective)
        self._next += 1
        return is_sent

    def listing_wholes(self) -> Patches:
        """Also list gathers by `DTensor.full_tensor`, as TRL makes with PEFT's head."""
        patches = Patches()
        patches.wrap(DTensor, "full_tensor", self._full_tensor)
        return patches

    def _full_tensor(
        self, original: Callable[..., torch.Tensor], shard: DTensor, **options: object
    ) -> torch.Tensor:
        if tuple(shard.placements) != (Shard(0),) or options:
            return original(shard, **options)
        # By hand: the original does not show whether an error came before the exchange.
        local, num = shard.to_local().detach(), shard.device_mesh.size()
        part = local.new_zeros(-(-len(shard) // num), *shard.shape[1:])
        part[: len(local)] = local
        whole = part.new_empty(num * len(part), *shard.shape[1:])
        if self.is_sent(shard):
            whole.zero_()
        else:
            dist.all_gather_into_tensor(whole, part, group=shard.device_mesh.get_group())
        whole = whole[: len(shard)]
        found: torch.Tensor = _Whole.apply(shard, whole)  # type: ignore[no-untyped-call]
        return found


class Counted:
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
