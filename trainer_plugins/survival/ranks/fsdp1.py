"""FSDP1: torch's `FullyShardedDataParallel`, whose units hold their weights in a flat parameter.

torch cannot restart after a failed pass. We call its own callback for the end of a backward pass,
without a reduction, and then release the state it does not expect: a gathered parameter not yet in
use, and a low-precision shard.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    _exec_order_utils,
    _flat_param,
    _runtime_utils,
)

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.patched import Patches
from trainer_plugins.survival.micro_batch import MicroBatch
from trainer_plugins.survival.ranks.sharded import Ledger, Sharded


class FSDP1(Sharded):
    """Handles ranks whose wrapped units hold a flat parameter each."""

    wrapper = FullyShardedDataParallel

    def __init__(self, trainer: HfTrainer, model: nn.Module) -> None:
        super().__init__(trainer, model)
        self._units: list[Any] = [
            unit for root in self._roots for unit in FullyShardedDataParallel.fsdp_modules(root)
        ]
        self._collectives = _Collectives(self._ledger)
        self._is_reducing: bool | None = None  # None: as the Trainer requests

    @classmethod
    def refusals(cls, trainer: HfTrainer) -> Iterator[str]:
        plugin = trainer.accelerator.state.fsdp_plugin
        if getattr(plugin.cpu_offload, "offload_params", plugin.cpu_offload):
            yield "FSDP 1 with offloaded weights does not add up gradients of pieces: use FSDP 2"
        strategy = plugin.sharding_strategy or plugin.reshard_after_forward
        if "HYBRID" in strategy.name:
            yield f"FSDP 1 with {strategy.name} is not supported: use FULL_SHARD, or FSDP 2"

    def begin(self, micro: MicroBatch) -> None:
        self._is_reducing = None
        super().begin(micro)

    def _listing(self) -> Patches:
        patches = self._reducing(self._is_reducing)
        for module in (_exec_order_utils, _flat_param, _runtime_utils):
            patches.set(module, "dist", self._collectives)
        return patches

    def _reducing(self, is_on: bool | None) -> Patches:
        patches = Patches()
        for unit in self._units if is_on is not None else ():
            patches.set(unit, "_sync_gradients", is_on)
        return patches

    def _num_gathers(self) -> int:
        return sum(handle.uses_sharded_strategy for _, handle in self._handles())

    def _forget_pass(self) -> None:
        for _, handle in self._handles():
            flat = handle.flat_param
            flat._post_backward_called = False
            # The callback expects another number of hooks if PEFT disabled an adapter meanwhile.
            if hooks := vars(flat).pop("_post_backward_hook_state", ()):
                hooks[-1].remove()
        with self._reducing(False):  # otherwise it hands gradients to the optimizer
            for root in self._roots:
                if root._is_root:  # it has run a forward pass
                    _runtime_utils._post_backward_final_callback(root, root)
        self._reshard()

    def _reshard(self) -> None:
        for unit, handle in self._handles():
            if handle.uses_sharded_strategy and handle._uses_param_mixed_precision:
                handle._free_low_precision_sharded_param()
            flat = handle.flat_param
            is_sharded = flat.data_ptr() == flat._local_shard.data_ptr()
            is_free = not handle.uses_sharded_strategy or handle.needs_unshard()
            if not (is_sharded and is_free) or handle._skipped_use_sharded_views:
                _runtime_utils._reshard(unit, handle, handle.uses_sharded_strategy)

    def _reduce_each(self, is_on: bool) -> None:
        self._is_reducing = is_on

    def _drop(self) -> None:
        super()._drop()
        for _, handle in self._handles():
            flat = handle.flat_param
            vars(flat).pop("_saved_grad_shard", None)
            for parameter in (flat, *(flat._params or ())):
                parameter.grad = None

    def _handles(self) -> Iterator[tuple[Any, Any]]:
        for unit in self._units:
            if unit._handle is not None and hasattr(unit._handle.flat_param, "_local_shard"):
                yield unit, unit._handle


class _Collectives:
    """Stands in for `torch.distributed` in FSDP1: lists collectives, and sends none twice."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._kinds: dict[tuple[str, int], object] = {}  # the key of each in the ledger

    def __getattr__(self, name: str) -> Any:
        found = getattr(dist, name)
        is_collective = name.startswith(("all_gather", "reduce_scatter", "all_reduce"))
        return partial(self._collective, name, found) if is_collective else found

    def _collective(
        self, name: str, send: Callable[..., object], outputs: Any, *inputs: Any, **options: object
    ) -> object:
        into = [outputs] if isinstance(outputs, torch.Tensor) else outputs
        kind = self._kinds.setdefault((name, sum(map(torch.numel, into))), object())
        if self._ledger.is_sent(kind):
            for tensor in into:
                tensor.zero_()
            return None
        if self._ledger.reduced is not None and not name.startswith("all_gather"):
            self._ledger.reduced.append((*inputs, outputs)[0].cpu().double())
        return send(outputs, *inputs, **options)
