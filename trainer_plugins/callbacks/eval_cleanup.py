"""EvalGenerateCleanup: after every evaluation and generation inside training, drop what they really left behind."""

import gc
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from trainer_plugins.callbacks._run import EvaluationCallback
from trainer_plugins.devices import Device
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.generation import drop_leftovers, guard_generate
from trainer_plugins.holders import tensors_held
from trainer_plugins.release import AgreedRelease
from trainer_plugins.timeline import Remark, Timeline
from trainer_plugins.units import size

logger = logging.getLogger(__name__)

GROWTH_FRACTION = 0.01
"""Share of the card by which an evaluation may leave more alive than it found, before a holder is looked for."""


class EvalGenerateCleanup(EvaluationCallback):
    """After every evaluation, prediction or generation that happens inside training, on every path there is.

    Drops what they really leave: the compiled forward of a static cache with its graph pools, and the manager of
    continuous batching with its paged cache. What it cannot drop, because somebody else refers to it (a cache object,
    gathered predictions), is named with its holder in an `evaluation-leftover` finding. Then the cached blocks are
    released if the ranks agree that this pays. The mode of the model and its gradient checkpointing are not touched.

    Cost: two readings and a vote of the ranks after each evaluation; where something was left, a garbage collection,
    about 0.1 s. A dropped compiled call is compiled again by the next evaluation that needs it.
    """

    def __init__(self, device: Device | None = None, timeline: Timeline | None = None) -> None:
        super().__init__(device, timeline)
        self._release: AgreedRelease | None = None
        self._allocated_before: int | None = None
        self._forget_generate: Callable[[], None] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        device = None if self.is_second(state) else self.device_for(args)
        self._release = AgreedRelease(device, self.timeline_for(args)) if device else None
        if self._release is None:
            return
        model: nn.Module = kwargs["model"]
        if self._forget_generate is not None:  # a training before this one raised
            self._forget_generate()
        if hasattr(model, "generate"):
            self._forget_generate = guard_generate(model, self._mark_generation)
        super().on_train_begin(args, state, control, **kwargs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_train_end(args, state, control, **kwargs)
        if self._forget_generate is not None:
            self._forget_generate()
            self._forget_generate = None
        self._release = None

    def before_evaluation(self, args: TrainingArguments, state: TrainerState, **kwargs: Any) -> None:
        self._note_before()

    def after_evaluation(self, args: TrainingArguments, state: TrainerState, moment: str, **kwargs: Any) -> None:
        if self._release is None:  # an evaluation outside training is its caller's to clean up
            return
        model: nn.Module = kwargs["model"]
        with self.harmless():
            dropped = drop_leftovers(model, reset_compiler=not args.torch_compile)
            if dropped:
                logger.info("step %d: dropped %s after %s", state.global_step, ", ".join(dropped), moment)
            if dropped or self._grown_bytes() > 0:
                gc.collect()
            finding = self._leftover(model, kwargs.get("optimizer"))
            if finding is not None:
                self.timeline_for(args).add(Remark(step=state.global_step, finding=finding))
                logger.log(finding.severity, "step %d: %s", state.global_step, finding)
            self._allocated_before = None
            self._release.consider(state.global_step, f"after {moment}")

    def _mark_generation(self, model: nn.Module, kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        # A generation outside an evaluation: cleaned up at the next event that ends an evaluation.
        if not self._evaluating:
            self._note_before()
            self._evaluating = True
        return nullcontext()

    def _note_before(self) -> None:
        if self._release is not None:
            self._allocated_before = self._release.device.read().allocated_bytes

    def _grown_bytes(self) -> int:
        """How much more is alive on the card than before the evaluation; 0 on the CPU, where that means little."""
        if self._release is None or self._allocated_before is None or self._release.device.name == "cpu":
            return 0
        return self._release.device.read().allocated_bytes - self._allocated_before

    def _leftover(self, model: nn.Module, optimizer: Any) -> Finding | None:
        if (grown_bytes := self._grown_bytes()) <= 0 or self._release is None:
            return None
        reading = self._release.device.read()
        if grown_bytes < GROWTH_FRACTION * reading.total_bytes:
            return None
        held = tensors_held(reading.device.split(":")[0], model, optimizer)
        return Finding(
            code="evaluation-leftover",
            severity=Severity.WARNING,
            summary=f"an evaluation left {size(grown_bytes)} more alive on {reading.device} than it found",
            evidence="; ".join(f"{size(h.num_bytes)} {list(h.shape)} held by {h.holder}" for h in held) or "no holder",
            remedy="Clear what holds it at the end of the evaluation, or move it off the card with .cpu().",
            amount=float(grown_bytes),
        )
