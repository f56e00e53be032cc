"""EvalGenerateCleanup: drops what evaluations, and generations inside training, left behind."""

import logging
from contextlib import AbstractContextManager, nullcontext

from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from trainer_plugins.callbacks._evaluations import EvaluationCallback
from trainer_plugins.callbacks._run import Event, model_of
from trainer_plugins.hf_trainer import HfArguments, HfState
from trainer_plugins.upkeep.agreement import StepEndVote, has_peers
from trainer_plugins.upkeep.generation import drop_leftovers, guard_generate, inside_training
from trainer_plugins.upkeep.holders import leftover
from trainer_plugins.upkeep.release import AgreedRelease

logger = logging.getLogger(__name__)

# How often several ranks ask each other, at a step's end, whether a release pays. A single process
# only notices memory outside torch then: what came long ago does not count as growth.
ASK_EVERY_STEPS = 10


class EvalGenerateCleanup(EvaluationCallback):
    """Cleans up after every evaluation or prediction, and every generation inside training.

    It drops what they leave: the compiled forward of a static cache with its graph pools, and the
    manager of continuous batching with its paged cache. What it cannot drop because something else
    refers to it (a cache object, gathered predictions) is reported with its holder, in an
    `evaluation-leftover` finding. After an evaluation or prediction, cached blocks are released if
    that pays: at once in a single process. With several ranks, of which one may have evaluated
    alone, at the end of the next step that is a multiple of 10, if all have this callback, and not
    after training. The mode of the model and its gradient checkpointing are not touched.

    Cost: two readings after each evaluation, and a vote of the ranks every 10 steps; if something
    was left, a garbage collection, about 0.1 s. A compiled call that was dropped is compiled again
    by the next evaluation that needs it.
    """

    def reset(self) -> None:
        super().reset()
        self._release: AgreedRelease | None = None
        self._allocated_before: int | None = None
        self._has_generated = False
        self._due: str | None = None  # the moment after which to ask for a release

    def run_begins(self, args: HfArguments, state: HfState, event: Event) -> None:
        device = self.device_for(args)
        if device is None:
            return
        vote = self.vote_every(ASK_EVERY_STEPS, args)
        self._release = AgreedRelease(device, self.timeline_for(args), vote)
        with self.harmless():
            self._release.notice(state.global_step)
        with self.harmless():
            self.undo.callback(guard_generate(model_of(event), self._mark_generation))
        super().run_begins(args, state, event)

    def on_step_begin(self, args: HfArguments, state: HfState, *_: object, **event: object) -> None:
        super().on_step_begin(args, state, **event)
        # A generation outside an evaluation may be this rank's alone, such as a preview on rank 0:
        # so no vote, and no comparison with a time before an optimizer step.
        if self._has_generated:
            with self.harmless():
                self._drop(state, "generate", model_of(event))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **event: object
    ) -> None:
        super().on_step_end(args, state, control, **event)
        if self._release is None or state.global_step % ASK_EVERY_STEPS:
            return
        with self.harmless():
            if has_peers():
                self._ask(self._release, state)
            else:
                self._release.notice(state.global_step)

    def on_train_end(self, args: HfArguments, state: HfState, *_: object, **event: object) -> None:
        super().on_train_end(args, state, **event)
        with self.harmless():
            self._drop(state, "generate", model_of(event))
        self.end_run()
        self._release = None

    def evaluation_begins(self, args: HfArguments, state: HfState, event: Event) -> None:
        self._allocated_before = None
        if self._release is not None:
            with self.harmless():
                self._allocated_before = self._release.device.read().allocated_bytes

    def evaluation_ends(self, args: HfArguments, state: HfState, moment: str, event: Event) -> None:
        if not inside_training():
            self._clean_up_at_the_end(args, state, moment, event)
            return
        if self._release is None:
            return
        with self.harmless():
            model = model_of(event)
            self._drop(state, moment, model)
            before, self._allocated_before = self._allocated_before, None
            finding = leftover(self._release.device, before, model, event.get("optimizer"))
            if finding is not None:
                self.remark(args, state.global_step, finding)
        self._due = moment
        # Other ranks may not have evaluated at all: ask them at the end of a step.
        if not has_peers():
            with self.harmless():
                self._ask(self._release, state)

    def _clean_up_at_the_end(
        self, args: HfArguments, state: HfState, moment: str, event: Event
    ) -> None:
        """Drop and release after an evaluation outside training; its results are its caller's."""
        device = self.device_if_first(args, state)
        with self.harmless():
            self._drop(state, moment, model_of(event))
            if device is not None and not has_peers():  # it may be one rank's evaluation
                vote = StepEndVote(type(self).__name__, args.ddp_timeout)
                release = AgreedRelease(device, self.timeline_for(args), vote)
                release.consider(state.global_step, f"after {moment}")

    def _ask(self, release: AgreedRelease, state: HfState) -> None:
        due, self._due = self._due, None
        release.consider(state.global_step, f"after {due or 'eval'}", is_due=due is not None)

    def _drop(self, state: HfState, moment: str, model: nn.Module) -> None:
        self._has_generated = False
        if dropped := drop_leftovers(model):
            logger.info(
                "step %d: dropped %s after %s", state.global_step, ", ".join(dropped), moment
            )

    def _mark_generation(self, *_: object) -> AbstractContextManager[None]:
        self._has_generated = True
        return nullcontext()
