"""FSDP1: torch's `FullyShardedDataParallel`, whose units hold their weights in one flat parameter.

torch has no way to begin again after a pass that failed. What its own callback does at the end of a
backward pass (`_post_backward_final_callback`) is done here for each unit, and what a failed pass
leaves besides: a gathered parameter that is not in use yet, and a shard in low precision.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.patched import Patches
from trainer_plugins.survival.micro_batch import MicroBatch
from trainer_plugins.survival.ranks.ledger import Ledger
from trainer_plugins.survival.ranks.sharded import Sharded


class FSDP1(Sharded):
    """Handles ranks whose units are wrapped, and hold a flat parameter each."""

    def __init__(self, trainer: HfTrainer, model: nn.Module) -> None:
        super().__init__(trainer, model)
        # TRL's second model gathers inside `compute_loss` too.
        roots = (model, getattr(trainer, "ref_model", None))
        self._roots: list[Any] = [r for r in roots if isinstance(r, FullyShardedDataParallel)]
        self._units: list[Any] = [
            unit for root in self._roots for unit in FullyShardedDataParallel.fsdp_modules(root)
        ]
        self._collectives = _Collectives(self._ledger)
        self._is_reducing: bool | None = None  # None: as the Trainer asks for

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

    @contextmanager
    def _listing(self) -> Iterator[None]:
        asked = [unit._sync_gradients for unit in self._units]
        with Patches() as patches:
            for module in (_exec_order_utils, _flat_param, _runtime_utils):
                patches.set(module, "dist", self._collectives)
            if self._is_reducing is not None:
                for unit in self._units:
                    unit._sync_gradients = self._is_reducing
            try:
                yield
            finally:
                for unit, is_reducing in zip(self._units, asked, strict=True):
                    unit._sync_gradients = is_reducing

    def _num_gathers(self) -> int:
        return sum(handle.uses_sharded_strategy for _, handle in self._handles())

    def _forget_pass(self) -> None:
        for root in self._roots:
            if not root._is_root:  # it has run no forward pass
                continue
            root._post_backward_callback_queued = False
            order = root._exec_order_data
            order.handles_post_forward_order.clear()
            order.current_order_index = 0
        for unit in self._units:
            unit.training_state = TrainingState.IDLE
        for _, handle in self._handles():
            flat = handle.flat_param
            if hooks := vars(flat).pop("_post_backward_hook_state", ()):
                hooks[-1].remove()
            flat._post_backward_called = False
            handle._training_state = HandleTrainingState.IDLE
            handle._ran_pre_backward_hook = handle._needs_pre_backward_unshard = False
            handle._post_forward_index = None
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
    """Is `torch.distributed` to FSDP1: it lists collectives, and sends none twice."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._kinds: dict[tuple[str, int], object] = {}  # what stands for each in the ledger

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
