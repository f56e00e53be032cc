"""Zero: DeepSpeed's ZeRO-1, 2 and 3.

All ranks compute the same number of pieces, known before a micro-batch begins.

The engine reduces gradients, and in stage 3 gathers weights, inside hooks of the forward and
backward pass. What a pass that fails leaves in them cannot be put back, and the other ranks wait
inside the same hooks. So nothing is retried:

* what fits is measured before step 1, with sizes that grow and are foreseen to fit, the same on all
  ranks (`most`);
* a micro-batch is divided on all ranks alike, into as many pieces as the rank that needs most
  (`highest`);
* every piece goes through the engine as a micro-batch of a window does, and only the last one may
  be the window's last;
* where something does not fit all the same, every rank stops with the reason (`failed`,
  `brake.py`).
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

from trainer_plugins.survival.attempt.attempt import DidNotFit
from trainer_plugins.survival.attempt.baseline import card_of
from trainer_plugins.survival.limit.limit import most
from trainer_plugins.survival.ranks.alone import SLACK, Alone
from trainer_plugins.survival.ranks.brake import pull_brake, watch_brake
from trainer_plugins.upkeep.agreement import Agreement


class Zero(Alone):
    """Of one run."""

    in_step = True
    options = MappingProxyType({"scale_wrt_gas": False})  # as Trainer.training_step has it

    def __init__(self, trainer: Trainer, model: nn.Module) -> None:
        super().__init__(trainer, model)
        engine: Any = model
        self._engine, self._stage = engine, int(engine.zero_optimization_stage())
        self._agreement = Agreement(timeout_seconds=trainer.args.ddp_timeout)
        self._has_peers = dist.get_world_size() > 1
        if self._has_peers:
            watch_brake()

    def highest(self, value: int) -> int:
        answer = self._agreement.highest(value)
        if answer is None:
            raise RuntimeError(self._stop("a rank did not answer how it divides its micro-batch"))
        return answer

    @property
    def bare(self) -> nn.Module:
        """In stage 3 no other than the engine: without it weights are not gathered."""
        module: nn.Module = self._engine if self._stage == 3 else self._engine.module
        return module

    def failed(self, phase: str, is_last: bool, changed: set[nn.Parameter]) -> str:
        return self._stop(f"a {phase} pass of ZeRO cannot be repeated")

    @contextmanager
    def piece(self, is_last: bool) -> Iterator[nn.Module]:
        """No step after a piece that is not the last; after the last one as the Trainer has it."""
        accelerator = self.trainer.accelerator
        is_step = accelerator.sync_gradients
        accelerator.sync_gradients = is_step and is_last
        try:
            yield self.model
        finally:
            accelerator.sync_gradients = is_step

    def most(self, compute: Callable[[nn.Module, int], object], num: int, least: int) -> int:
        """Never tries what is not foreseen to fit, from a line through the peaks of the sizes before."""
        peaks: list[tuple[int, int]] = []
        try:
            with self.piece(is_last=False) as model:
                return most(
                    partial(self._fits, compute=partial(compute, model), peaks=peaks),
                    *(-self.highest(-num), least, (least, 2 * least, num)),
                )
        finally:
            self.forget()

    def gradient(
        self, loss: Callable[[], torch.Tensor], parameters: list[nn.Parameter]
    ) -> list[torch.Tensor] | DidNotFit:
        """As of one process. In stage 3 the other ranks wait in the same pass."""
        outcome = super().gradient(loss, parameters)
        if isinstance(outcome, DidNotFit) and self._stage == 3:
            why = self._stop(
                "what a measurement takes did not fit, and a pass of ZeRO cannot be repeated"
            )
            raise torch.OutOfMemoryError(f"{outcome.words}\n{why}")
        return outcome

    def forget(self) -> None:
        """Drop the gradients of passes that were none of a step.

        Only where a window begins: it drops them all.
        """
        optimizer = self._engine.optimizer
        optimizer.zero_grad()
        if self._stage < 3:
            optimizer.all_grad_tensors.clear()
            optimizer.averaged_gradients.clear()
            optimizer.micro_step_id = INITIAL_MICRO_STEP_ID

    def _fits(
        self, size: int, compute: Callable[[int], object], peaks: list[tuple[int, int]]
    ) -> bool:
        card = card_of(self.trainer.args.device)
        reading = card.read() if card else None
        if card is None or reading is None:
            raise RuntimeError(self._stop("the memory of its card cannot be read"))
        room_bytes = (1 - SLACK) * (reading.total_bytes - reading.non_torch_bytes)
        if self.highest(int(foreseen(peaks, size) > room_bytes)):
            return False
        card.reset_peak()
        failure = self.attempt(partial(compute, size))
        if isinstance(failure, DidNotFit):
            raise torch.OutOfMemoryError(
                f"{failure.words}\n{self._stop(f'{size} of the longest rows do not fit')}"
            )
        if (after := card.read()) is None:
            raise RuntimeError(self._stop("the memory of its card cannot be read"))
        peaks.append((size, after.peak_allocated_bytes))
        return True

    def _stop(self, why: str) -> str:
        """End the run on every rank. Returns what to say."""
        folder, step = self.trainer.args.output_dir, self.trainer.state.global_step
        # On another machine than rank 0's it may not be there.
        last = get_last_checkpoint(folder) if os.path.isdir(folder) else None
        if self._engine._running_engine_step:
            why = "it came in the optimizer step, and weights may have moved"
        kept = f"The last checkpoint is {last}" if last else f"There is no checkpoint in {folder}"
        said = f"{why}, so all ranks stop, after step {step}. {kept}"
        if self._has_peers:
            pull_brake(said)
        return said


def foreseen(peaks: list[tuple[int, int]], size: int) -> float:
    """The peak of a size, in bytes, by the line through the last two that were measured; 0 where there are not two.

    >>> foreseen([(1, 30), (2, 50)], 8), foreseen([(1, 30)], 8)
    (170.0, 0.0)
    """
    if len(peaks) < 2:
        return 0.0
    (small, low), (large, high) = sorted(peaks)[-2:]
    return low + (size - small) * (high - low) / (large - small)
