"""Zero: DeepSpeed's ZeRO-1, 2 and 3. All ranks divide equally, before a micro-batch begins.

Nothing is retried: the effects of a failed pass on the engine's hooks cannot be undone, and the
other ranks wait in the same hooks. Before step 1 we measure how much fits, with sizes predicted to
fit (`most`). All ranks divide into as many pieces as the neediest rank, and each piece goes through
the engine like a micro-batch of a window. If one still fails, every rank stops and logs why. No
exception reaches a collective, so a thread on each rank polls the brake in their store.
"""

import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.trainer_utils import get_last_checkpoint

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.survival.attempt.attempt import DidNotFit, card_of
from trainer_plugins.survival.limit.limit import SLACK, most, predict_peak, read_allowed_bytes
from trainer_plugins.survival.ranks.alone import Compute, Gradient, HowToRecover, Loss, Together
from trainer_plugins.upkeep.agreement import ranks_store

_OPTIMIZERS = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3")

# The attributes we use of the engine, and of the optimizers of ZeRO-1 and ZeRO-2.
_ENGINE = (
    "optimizer",
    "zero_optimization_stage",
    "set_gradient_accumulation_boundary",
    "_running_engine_step",
)
_STAGES_1_AND_2 = ("all_grad_tensors", "averaged_gradients", "zero_grad")

_BRAKE = "trainer_plugins/brake"  # key in the store
_THREAD = "trainer_plugins-brake"
_GRACE_SECONDS = 5.0  # time for a rank to end with an exception after another one stops

_ZERO_PLUS_PLUS = (
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
)


class Zero(Together):
    """Handles ranks that hold a part of states, gradients or weights."""

    recovery = HowToRecover.PLANNED
    # Arguments that `Trainer.training_step` passes to `accelerator.backward` under DeepSpeed.
    options: Mapping[str, object] = MappingProxyType({"scale_wrt_gas": False})

    def __init__(self, trainer: HfTrainer, model: nn.Module) -> None:
        super().__init__(trainer, model)
        engine: Any = model
        self._engine, self._stage = engine, int(engine.zero_optimization_stage())
        self._has_peers = dist.get_world_size() > 1
        is_watching = any(thread.name == _THREAD for thread in threading.enumerate())
        if self._has_peers and not is_watching:
            threading.Thread(target=_watch_brake, daemon=True, name=_THREAD).start()

    @classmethod
    def refusals(cls, trainer: HfTrainer) -> Iterator[str]:
        from accelerate.utils import DeepSpeedEngineWrapper

        plugin = trainer.accelerator.state.deepspeed_plugin
        if plugin.zero_stage == 0:
            yield "DeepSpeed without ZeRO (stage 0) is not supported: use stage 1, 2 or 3, or DDP"
        if "sync_gradients" not in inspect.signature(DeepSpeedEngineWrapper.backward).parameters:
            yield "this accelerate counts pieces as micro-batches of the window: use 1.15 or newer"
        yield from _judge_config(plugin.deepspeed_config)
        if "pipeline" in plugin.deepspeed_config or hasattr(trainer.model, "pipeline_enable"):
            yield "pipeline parallelism is not supported: it splits micro-batches itself"
        if (engine := getattr(trainer, "deepspeed", None)) is not None:
            yield from _judge_engine(engine)  # not there yet at attach

    @property
    def bare(self) -> nn.Module:
        """Return the model without the engine; in stage 3 the engine, which gathers the weights."""
        module: nn.Module = self._engine if self._stage == 3 else self._engine.module
        return module

    def note_failure(self, phase: str, changed: set[nn.Parameter]) -> str:
        return self._stop(f"a {phase} pass of ZeRO cannot be repeated")

    @contextmanager
    def piece(self, is_last: bool) -> Iterator[nn.Module]:
        accelerator = self.trainer.accelerator
        is_step = accelerator.sync_gradients
        accelerator.sync_gradients = is_step and is_last
        try:
            yield self.model
        finally:
            accelerator.sync_gradients = is_step

    def most(self, compute: Compute, num: int, least: int, parts: Sequence[float] = ()) -> int:
        peaks: list[tuple[float, int]] = []
        try:
            with self.piece(is_last=False) as model:
                fits = partial(self._fits, compute=partial(compute, model), peaks=peaks)
                if not all(map(fits, parts)):
                    return 0
                return most(fits, self.lowest(num), least, (least, 2 * least, num))
        finally:
            self.forget()

    def gradient(self, loss: Loss, parameters: list[nn.Parameter]) -> Gradient:
        """Compute a gradient as one process does; in stage 3 the others wait if it does not fit."""
        outcome = super().gradient(loss, parameters)
        if isinstance(outcome, DidNotFit) and self._stage == 3:
            why = self._stop("a measurement did not fit, and a pass of ZeRO cannot be repeated")
            raise torch.OutOfMemoryError(f"{outcome.words}\n{why}")
        return outcome

    def forget(self) -> None:
        from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

        optimizer = self._engine.optimizer
        optimizer.zero_grad()
        if self._stage < 3:
            optimizer.all_grad_tensors.clear()
            optimizer.averaged_gradients.clear()
            optimizer.micro_step_id = INITIAL_MICRO_STEP_ID

    def _fits(
        self, size: float, compute: Callable[[float], object], peaks: list[tuple[float, int]]
    ) -> bool:
        device = self.trainer.args.device
        card = card_of(device)
        if (reading := card.read()) is None:
            raise RuntimeError(self._stop("the memory of its card cannot be read"))
        free_bytes = reading.total_bytes - reading.non_torch_bytes
        room_bytes = (1 - SLACK) * min(free_bytes, read_allowed_bytes(reading, device))
        if self.on_any(predict_peak(peaks, size) > room_bytes):
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
        folder, step = self.trainer.args.output_dir, self.trainer.state.global_step
        # It may be missing on machines other than rank 0's.
        last = get_last_checkpoint(folder) if os.path.isdir(folder) else None
        if self._engine._running_engine_step:
            why = "it failed in the optimizer step, and weights may have moved"
        kept = f"The last checkpoint is {last}" if last else f"There is no checkpoint in {folder}"
        said = f"{why}, so all ranks stop, after step {step}. {kept}"
        if self._has_peers:
            ranks_store().set(_BRAKE, f"{dist.get_rank()}\n{said}")
        return said

    def _explain_no_answer(self) -> str:
        return self._stop("a rank did not answer how it divides its micro-batch")


def _judge_config(config: Mapping[str, Any]) -> Iterator[str]:
    zero: Mapping[str, Any] = config.get("zero_optimization", {})
    for part in ("offload_optimizer", "offload_param"):
        if (zero.get(part) or {}).get("device") == "nvme":
            yield f"{part} to NVMe is not supported"
    if zero.get("mics_shard_size", -1) not in (-1, 0) or zero.get(
        "mics_hierarchical_params_gather"
    ):
        yield "MiCS is not supported"
    if zero.get("zero_hpz_partition_size", 1) > 1 or any(map(zero.get, _ZERO_PLUS_PLUS)):
        yield "ZeRO++ (zero_hpz_partition_size, zero_quantized_*) is not supported"
    if zero.get("zenflow"):
        yield "ZenFlow updates weights inside the backward pass"
    if (zero.get("offload_optimizer") or {}).get("super_offload"):
        yield "SuperOffload is not supported"
    if config.get("compile", {}).get("deepcompile"):
        yield "DeepCompile compiles again for every size of a piece"
    if config.get("sequence_parallel_size", 1) > 1:
        yield "sequence parallelism is not supported: every rank holds a part of each row"
    if config.get("tensor_parallel", {}).get("autotp_size", 0) > 1:
        yield "tensor parallelism (autotp_size) is not supported: its ranks hold the same rows"


def _judge_engine(engine: Any) -> Iterator[str]:
    name = type(engine.optimizer).__name__
    if name not in _OPTIMIZERS:
        yield f"DeepSpeed's {name} is not supported"
    missing = [attribute for attribute in _ENGINE if not hasattr(engine, attribute)]
    if engine.zero_optimization_stage() < 3:
        missing += [
            attribute for attribute in _STAGES_1_AND_2 if not hasattr(engine.optimizer, attribute)
        ]
    if missing:
        yield f"this version of DeepSpeed has no {', '.join(missing)}: please report it"


def _watch_brake() -> None:
    """While the process group lives, wait for a rank that stops, and then end this process."""
    world, store, rank = dist.group.WORLD, ranks_store(), dist.get_rank()
    while dist.is_initialized() and dist.group.WORLD is world:
        time.sleep(1.0)
        try:
            if not store.check([_BRAKE]):
                continue
            who, _, why = store.get(_BRAKE).decode().partition("\n")
        except RuntimeError:  # the store went with the rank that kept it
            return
        if int(who) != rank:
            sys.stderr.write(f"rank {rank} stops, because rank {who} cannot continue: {why}\n")
        threading.main_thread().join(_GRACE_SECONDS)
        if threading.main_thread().is_alive():
            sys.stderr.write(
                f"rank {rank} ends now: it was still running {_GRACE_SECONDS:.0f} s later\n"
            )
            sys.stderr.flush()
            os._exit(1)
        return
