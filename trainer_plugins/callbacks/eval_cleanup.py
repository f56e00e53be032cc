"""EvalGenerateCleanup: after every evaluation and generation inside training, drop what they really left behind."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from trainer_plugins.callbacks._run import EvaluationCallback
from trainer_plugins.devices import Device
from trainer_plugins.record.timeline import Remark, Timeline
from trainer_plugins.upkeep.agreement import has_peers
from trainer_plugins.upkeep.generation import drop_leftovers, guard_generate, inside_training
from trainer_plugins.upkeep.holders import leftover
from trainer_plugins.upkeep.release import AgreedRelease

logger = logging.getLogger(__name__)

ASK_EVERY_STEPS = 10
"""How often several ranks ask each other whether a release after an evaluation pays, at the end of
a step. One process asks at once, and only notices memory outside torch as often, so that a
neighbour who came long ago is no news."""


class EvalGenerateCleanup(EvaluationCallback):
    """After every evaluation, prediction or generation that happens inside training, on every path there is.

    Drops what they really leave: the compiled forward of a static cache with its graph pools, and
    the manager of continuous batching with its paged cache. What it cannot drop, because somebody
    else refers to it (a cache object, gathered predictions), is named with its holder in an
    `evaluation-leftover` finding. After an evaluation or prediction the cached blocks are released
    where this pays: at once in one process; with several ranks, of which one may have evaluated
    alone, at the end of the next step that is a multiple of 10, if all have this callback. The mode
    of the model and its gradient checkpointing are not touched.

    Cost: two readings after each evaluation, and a vote of the ranks every 10 steps; where
        something was left, a
    garbage collection, about 0.1 s. A dropped compiled call is compiled again by the next
    evaluation that needs it.
    """

    def __init__(self, device: Device | None = None, timeline: Timeline | None = None) -> None:
        super().__init__(device, timeline)

    def at_rest(self) -> None:
        super().at_rest()
        self._release: AgreedRelease | None = None
        self._allocated_before: int | None = None
        self._has_generated = False
        self._forget_generate: Callable[[], None] | None = None
        self._due: str | None = None
        """After what a release is to be asked for."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.begin_run()
        device = None if self.is_second(state) else self.device_for(args)
        if device is None:
            return
        vote = self.vote_every(ASK_EVERY_STEPS, args)
        self._release = AgreedRelease(device, self.timeline_for(args), vote)
        with self.harmless():
            self._release.notice(state.global_step)
        model: nn.Module = kwargs["model"]
        if hasattr(model, "generate"):
            self._forget_generate = guard_generate(model, self._mark_generation)
        super().on_train_begin(args, state, control, **kwargs)

    def end_run(self) -> None:
        super().end_run()
        if self._forget_generate is not None:
            self._forget_generate()
            self._forget_generate = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_step_begin(args, state, control, **kwargs)
        # A generation outside an evaluation may be this rank's alone, a preview of rank 0: so no
        # vote, and no judgement against a time before an optimizer step.
        if self._has_generated:
            with self.harmless():
                self._drop(state, "generate", kwargs["model"])

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_step_end(args, state, control, **kwargs)
        if self._release is None or state.global_step % ASK_EVERY_STEPS:
            return
        with self.harmless():
            if has_peers():
                self._ask(state)
            else:
                self._release.notice(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_train_end(args, state, control, **kwargs)
        with self.harmless():
            self._drop(state, "generate", kwargs["model"])
        self.end_run()
        self._release = None

    def before_evaluation(
        self, args: TrainingArguments, state: TrainerState, **kwargs: Any
    ) -> None:
        self._allocated_before = None
        if self._release is not None:
            with self.harmless():
                self._allocated_before = self._release.device.read().allocated_bytes

    def after_evaluation(
        self, args: TrainingArguments, state: TrainerState, moment: str, **kwargs: Any
    ) -> None:
        if self._release is None or not inside_training():  # outside, its caller is to clean up
            return
        with self.harmless():
            self._drop(state, moment, kwargs["model"])
            before, self._allocated_before = self._allocated_before, None
            finding = leftover(
                self._release.device, before, kwargs["model"], kwargs.get("optimizer")
            )
            if finding is not None:
                self.timeline_for(args).add(Remark(step=state.global_step, finding=finding))
                logger.log(finding.severity, "step %d: %s", state.global_step, finding)
        self._due = moment
        if (
            not has_peers()
        ):  # others may not have evaluated at all: they are asked where all of them come
            with self.harmless():
                self._ask(state)

    def _ask(self, state: TrainerState) -> None:
        due, self._due = self._due, None
        if self._release is not None:
            self._release.consider(
                state.global_step, f"after {due or 'eval'}", is_due=due is not None
            )

    def _drop(self, state: TrainerState, moment: str, model: nn.Module) -> None:
        self._has_generated = False
        if dropped := drop_leftovers(model):
            logger.info(
                "step %d: dropped %s after %s", state.global_step, ", ".join(dropped), moment
            )

    def _mark_generation(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[None]:
        self._has_generated = True
        return nullcontext()
