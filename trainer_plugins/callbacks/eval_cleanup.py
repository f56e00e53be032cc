"""EvalGenerateCleanup: frees memory left by evaluations and by generation inside training."""

import logging
from contextlib import AbstractContextManager, nullcontext

from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from trainer_plugins.callbacks._evaluations import EvaluationCallback
from trainer_plugins.callbacks._run import Event, model_of
from trainer_plugins.hf_trainer import HfArguments, HfState
from trainer_plugins.upkeep.agreement import StepEndVote, has_peers
from trainer_plugins.upkeep.generation import drop_leftovers, guard_generate, inside_training
from trainer_plugins.upkeep.release import AgreedRelease

logger = logging.getLogger(__name__)

# How often multiple ranks vote, at the end of a step, on a release. A single process only notes
# memory outside torch then, so that older growth does not count as new.
ASK_EVERY_STEPS = 10


class EvalGenerateCleanup(EvaluationCallback):
    """Cleans up after every evaluation or prediction, and after generation inside training.

    It drops the compiled forward of a static cache with its graph pools, and the manager of
    continuous batching with its paged cache. If something else still refers to a leftover (a cache
    object, gathered predictions), an `evaluation-leftover` finding names the holder.

    After an evaluation or prediction it also frees cached blocks when that pays off. A single
    process does so at once. Multiple ranks, of which only one may have evaluated, do so at the end
    of the next step that is a multiple of 10, if all of them have this callback, and not after
    training. The callback leaves the mode of the model and its gradient checkpointing alone.

    Cost: two readings per evaluation, and a vote of the ranks every 10 steps. If something was
    left, also a garbage collection, about 0.1 s. The next evaluation that needs a dropped compiled
    forward compiles it again.
    """

    def reset(self) -> None:
        super().reset()
        self._release: AgreedRelease | None = None
        self._allocated_before: int | None = None
        self._has_generated = False
        self._due: str | None = None  # moment of the evaluation that made a release due

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
        # Generation outside an evaluation may run on this rank alone, such as a preview on rank 0.
        # So there is no vote, and no comparison with memory before an optimizer step.
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
            from trainer_plugins.upkeep.holders import leftover  # slow to import

            self._drop(state, moment, model_of(event))
            before, self._allocated_before = self._allocated_before, None
            finding = leftover(self._release.device, before)
            if finding is not None:
                self.remark(args, state.global_step, finding)
        self._due = moment
        # Other ranks may not have evaluated: ask them at the end of a step.
        if not has_peers():
            with self.harmless():
                self._ask(self._release, state)

    def _clean_up_at_the_end(
        self, args: HfArguments, state: HfState, moment: str, event: Event
    ) -> None:
        """Clean up after an evaluation outside training, whose results belong to the caller."""
        device = self.device_if_first(args, state)
        with self.harmless():
            self._drop(state, moment, model_of(event))
            if device is not None and not has_peers():  # only one rank may be evaluating
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
