"""What the callbacks of one run share: its device, the timeline of its rank, and when an evaluation ended."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from uuid import uuid4
from weakref import ref

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from trainer_plugins.callbacks._order import keep_first_place
from trainer_plugins.devices import Device, open_device
from trainer_plugins.record.timeline import Timeline, timeline_of_run
from trainer_plugins.upkeep.agreement import StepEndVote

logger = logging.getLogger(__name__)


class RunCallback(TrainerCallback):
    """A callback with a device and a timeline: those it was given, or else the run's own."""

    def __init__(self, device: Device | None = None, timeline: Timeline | None = None) -> None:
        self._given_device, self._given_timeline = device, timeline
        self._number = uuid4().int
        """Who this is, and its copies are: people copy Trainers and states, in which `id` would be another's."""
        self._has_failed = False
        self._users_own: Callable[[], list[TrainerCallback]] = list
        self.at_rest()

    def at_rest(self) -> None:
        """Set what belongs to one run as it is outside of one.

        Sets attributes only: a copy of a callback does it too.

        A subclass sets its own here, and not in `__init__`.
        """
        self._device, self._timeline = self._given_device, self._given_timeline
        self._cannot_read = False
        self._vote: StepEndVote | None = None

    def begin_run(self) -> None:
        """Forget the run before, which may have raised: one callback may serve several Trainers, one by one."""
        self.end_run()
        self.at_rest()

    def end_run(self) -> None:
        """Take back what was done for the length of a run. Again it does nothing."""
        if self._vote is not None:
            self._vote.leave()

    def vote_every(self, num_steps: int, args: TrainingArguments) -> StepEndVote:
        """The vote in which all ranks of this run take part that have this callback, every so many steps."""
        who = f"{type(self).__name__} (every {num_steps} step{'s' * (num_steps > 1)})"
        self._vote = StepEndVote(who, args.ddp_timeout)
        return self._vote

    def device_for(self, args: TrainingArguments) -> Device | None:
        """The device, opened at the first event that needs it; None, said once, where this kind cannot be read.

        At the first event: a callback added after the Trainer was built never hears on_init_end,
        and trainer.evaluate() alone never fires on_train_begin.
        """
        if self._device is None and not self._cannot_read:
            self._cannot_read = True
            with self.harmless():
                try:
                    self._device = open_device(args.device)
                    self._cannot_read = False
                except ValueError as error:
                    logger.warning("%s does nothing in this run: %s", type(self).__name__, error)
        return self._device

    def timeline_for(self, args: TrainingArguments) -> Timeline:
        if self._timeline is None:
            self._timeline = timeline_of_run(args.output_dir, args.process_index)
        return self._timeline

    @contextmanager
    def harmless(self) -> Iterator[None]:
        """Around what is done inside training: whatever goes wrong in it is said, once, and training goes on.

        The one place that catches everything: a monitor must not end a run that costs days. The
        callback goes on, too: if it fell silent on one rank, the others would wait for its votes.
        """
        try:
            yield
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                logger.exception(
                    "%s failed; training goes on, and this is said once", type(self).__name__
                )

    def given_to(
        self, handler: CallbackHandler, was_given: Callable[[TrainerCallback], bool]
    ) -> None:
        """Note that this callback was not given by the user, and gives way to one of its class that was."""
        known = ref(handler)
        self._users_own = lambda: [
            one for one in getattr(known(), "callbacks", []) if not was_given(one)
        ]

    def is_second(self, state: TrainerState) -> bool:
        """Whether this run has another callback of this class that counts.

        Two would each see half of the peaks.

        Where it is this very callback that was given twice, its second place in the Trainer's list
        is emptied.
        """
        if any(isinstance(one, type(self)) for one in self._users_own()):
            return True
        # All callbacks of a run are handed the same state, and what is no field of it is never
        # saved.
        numbers = (
            vars(state).setdefault("_memory_callbacks", {}).setdefault(type(self).__name__, [])
        )
        if self._number not in numbers:
            numbers.append(self._number)
            is_twice = keep_first_place(lambda one: getattr(one, "_number", None) == self._number)
            if is_twice or numbers[0] != self._number:
                logger.warning(
                    "%s was added twice: the second one does nothing. Remove one",
                    type(self).__name__,
                )
        return bool(numbers[0] != self._number)

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a callback belongs to no Trainer, and to no run."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__, _users_own=list)
        copy.at_rest()
        return copy.__dict__


class EvaluationCallback(RunCallback):
    """A callback that hears of the end of every evaluation, whatever path the Trainer's subclass takes.

    `on_evaluate` alone is not reliable: a subclass that overrides `evaluate` may return without it,
    as open-unlearning's FinetuneTrainer does. `control.should_evaluate` is set before each
    evaluation inside training, so what follows it is told by the first event after it that no
    evaluation fires. Outside training, as in the final `trainer.evaluate()`, all that is heard of
    such a subclass is what it logs.
    """

    def at_rest(self) -> None:
        super().at_rest()
        self._evaluating = False

    def before_evaluation(
        self, args: TrainingArguments, state: TrainerState, **kwargs: Any
    ) -> None:
        """An evaluation inside training is about to begin."""

    def after_evaluation(
        self, args: TrainingArguments, state: TrainerState, moment: str, **kwargs: Any
    ) -> None:
        """An evaluation (`eval`) or prediction (`predict`) has ended, inside training or not."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._evaluating = False
        if args.eval_on_start:
            self._begin(args, state, **kwargs)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if control.should_evaluate:
            self._begin(args, state, **kwargs)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._settle(args, state, **kwargs)
        if control.should_evaluate:
            self._begin(args, state, **kwargs)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._evaluating = False
        self.after_evaluation(args, state, "eval", **kwargs)

    def on_predict(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._evaluating = False
        self.after_evaluation(args, state, "predict", **kwargs)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        with self.harmless():
            if _in_an_evaluation_without_events():
                self.after_evaluation(args, state, "eval", **kwargs)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._settle(args, state, **kwargs)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._settle(args, state, **kwargs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._settle(args, state, **kwargs)

    def _begin(self, args: TrainingArguments, state: TrainerState, **kwargs: Any) -> None:
        self._evaluating = True
        self.before_evaluation(args, state, **kwargs)

    def _settle(self, args: TrainingArguments, state: TrainerState, **kwargs: Any) -> None:
        if self._evaluating:
            self._evaluating = False
            self.after_evaluation(args, state, "eval", **kwargs)


def calling_trainer() -> Trainer | None:
    """The Trainer whose event this is.

    Callbacks are handed the model without its wrapper, and no Trainer.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        # Only frames of methods, and none above the Trainer's: to read the variables of a frame
        # keeps them alive.
        if frame.f_code.co_varnames[:1] == ("self",) and isinstance(
            frame.f_locals["self"], Trainer
        ):
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


def _in_an_evaluation_without_events() -> bool:
    """Whether a subclass's own `evaluate` is running, and neither training nor the Trainer's, which tell by events."""
    trainer, frame = calling_trainer(), sys._getframe()
    own = getattr(type(trainer).evaluate, "__code__", None) if trainer is not None else None
    running = set()
    while frame.f_back is not None:
        frame = frame.f_back
        running.add(frame.f_code)
    return own in running and not running & {Trainer.train.__code__, Trainer.evaluate.__code__}
