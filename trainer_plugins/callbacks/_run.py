"""Callbacks of one run share its device, its timeline, and the knowledge that it evaluates."""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from uuid import uuid4
from weakref import ref

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from trainer_plugins.callbacks._order import keep_first_place
from trainer_plugins.devices import Device, open_device
from trainer_plugins.record.timeline import Timeline, timeline_of_run
from trainer_plugins.record.webhook import webhook_of_run
from trainer_plugins.upkeep.agreement import StepEndVote
from trainer_plugins.upkeep.frames import frames_above
from trainer_plugins.upkeep.generation import inside_training

logger = logging.getLogger(__name__)

Kind = TypeVar("Kind", bound=TrainerCallback)

_said: set[str] = set()
"""What is said once in a process, whichever callback finds it."""


class NoModelError(TypeError):
    """Says that a Trainer passes something that is no model to its events, as setfit's does."""


class RunCallback(TrainerCallback):
    """Holds a device and a timeline for a callback: those it was given, or the run's own."""

    def __init__(self, device: Device | None = None, timeline: Timeline | None = None) -> None:
        self._given_device, self._given_timeline = device, timeline
        self._number = uuid4().int
        """The identity of this callback and its copies; with copied Trainers `id` is ambiguous."""
        self._has_failed = False
        self._users_own: Callable[[], list[TrainerCallback]] = list
        self.at_rest()

    def at_rest(self) -> None:
        """Reset the attributes that belong to one run. A copy of a callback does this too.

        Subclasses set theirs here, not in `__init__`.
        """
        self._device, self._timeline = self._given_device, self._given_timeline
        self._cannot_read = False
        self._vote: StepEndVote | None = None

    def begin_run(self) -> None:
        """Forget the run before, which may have raised: a callback may serve several Trainers."""
        self.end_run()
        self.at_rest()

    def end_run(self) -> None:
        """Undo what was done for the run. A second call does nothing."""
        if self._vote is not None:
            self._vote.leave()

    def vote_every(self, num_steps: int, args: TrainingArguments) -> StepEndVote:
        """Return a vote, every so many steps, of all ranks of this run that have this callback."""
        who = f"{type(self).__name__} (every {num_steps} step{'s' * (num_steps > 1)})"
        self._vote = StepEndVote(who, args.ddp_timeout)
        return self._vote

    def device_for(self, args: TrainingArguments) -> Device | None:
        """Return the device, opened at first use; None, logged once, if it cannot be read.

        Not earlier: a callback that was added to a finished Trainer never gets on_init_end, and
        trainer.evaluate() alone never fires on_train_begin.
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
        if self._timeline.listener is None:
            self._timeline.listener = webhook_of_run(args.output_dir, args.process_index)
        return self._timeline

    @contextmanager
    def harmless(self) -> Iterator[None]:
        """Guard work inside training: log any exception once, and let training go on.

        This is the one place that catches everything: a monitor must not end a run that costs days.
        The callback goes on too: if one rank fell silent, the others would wait for its votes.
        """
        try:
            yield
        except NoModelError as error:
            if str(error) not in _said:
                _said.add(str(error))
                logger.warning("%s", error)
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                logger.exception(
                    "%s failed; training goes on, and this is logged once", type(self).__name__
                )

    def given_to(
        self, handler: CallbackHandler, was_given: Callable[[TrainerCallback], bool]
    ) -> None:
        """Note that this callback was inserted for the user, and yields to the user's own."""
        known = ref(handler)
        self._users_own = lambda: [
            one for one in getattr(known(), "callbacks", []) if not was_given(one)
        ]

    def is_second(self, state: TrainerState) -> bool:
        """Return whether another callback of this class counts in this run.

        Two would each see half of the peaks. If this very callback was given twice, its second
        place in the Trainer's list is emptied.
        """
        if any(isinstance(one, type(self)) for one in self._users_own()):
            return True
        # All callbacks of a run get the same state; what is not a field of it is never saved.
        numbers = (
            vars(state).setdefault("_memory_callbacks", {}).setdefault(type(self).__name__, [])
        )
        if self._number not in numbers:
            numbers.append(self._number)
            is_twice = keep_first_place(lambda one: getattr(one, "_number", None) == self._number)
            if is_twice or numbers[0] != self._number:
                logger.warning(
                    "%s was added twice: the second one has no effect. Remove one",
                    type(self).__name__,
                )
        return bool(numbers[0] != self._number)

    def __getstate__(self) -> dict[str, object]:
        """Return the state of a copy, which belongs to no Trainer and to no run."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__, _users_own=list)
        copy.at_rest()
        return copy.__dict__


class EvaluationCallback(RunCallback):
    """Tells a callback of the end of every evaluation, even if a Trainer's subclass hides it.

    `on_evaluate` alone is not reliable: a subclass that overrides `evaluate` may not fire it, as
    open-unlearning's FinetuneTrainer does not. `control.should_evaluate` is set before each
    evaluation inside training, so the end is taken from the next event that no evaluation fires.
    Outside training, as in a final `trainer.evaluate()`, the method itself tells it. The beginning
    is told by an event, and once more by the method: other callbacks act in between.
    """

    def at_rest(self) -> None:
        super().at_rest()
        self._evaluating = self.is_inside = False
        """Whether an end is due, and whether an `evaluate` of the Trainer is running."""
        self.num_evaluations = 0
        """How many evaluations and predictions have told of their end."""

    def before_evaluation(
        self, args: TrainingArguments, state: TrainerState, **kwargs: object
    ) -> None:
        """Handle the beginning of an evaluation; inside training it may be told twice."""

    def after_evaluation(
        self, args: TrainingArguments, state: TrainerState, moment: str, **kwargs: object
    ) -> None:
        """Handle the end of an evaluation (`eval`) or a prediction (`predict`), anywhere."""

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        _have_evaluations_seen()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self._evaluating = False
        _have_evaluations_seen()
        if args.eval_on_start:
            self._begin(args, state, **kwargs)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        if control.should_evaluate:
            self._begin(args, state, **kwargs)

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self._settle(args, state, **kwargs)
        if control.should_evaluate:
            self._begin(args, state, **kwargs)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self._evaluating = False
        self.num_evaluations += 1
        self.after_evaluation(args, state, "eval", **kwargs)

    def on_predict(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self._evaluating = False
        self.num_evaluations += 1
        self.after_evaluation(args, state, "predict", **kwargs)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self._settle(args, state, **kwargs)

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self._settle(args, state, **kwargs)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self._settle(args, state, **kwargs)

    @contextmanager
    def evaluating(
        self, args: TrainingArguments, state: TrainerState, **kwargs: object
    ) -> Iterator[None]:
        """Surround a call of the Trainer's `evaluate`, inside training or outside."""
        self.is_inside = True
        self._begin(args, state, **kwargs)
        try:
            yield
        finally:
            self.is_inside = False

    def _begin(self, args: TrainingArguments, state: TrainerState, **kwargs: object) -> None:
        self._evaluating = True
        self.before_evaluation(args, state, **kwargs)

    def _settle(self, args: TrainingArguments, state: TrainerState, **kwargs: object) -> None:
        if self._evaluating:
            self._evaluating = False
            self.after_evaluation(args, state, "eval", **kwargs)


def model_of(event: Mapping[str, object]) -> nn.Module:
    """Return the model that the Trainer passes to an event.

    Raises:
        NoModelError: there is none.
    """
    model = event.get("model")
    if not isinstance(model, nn.Module):
        raise NoModelError(
            f"this Trainer passes a {type(model).__name__} to its callbacks, which is no nn.Module:"
            " what looks at the model does nothing in its runs"
        )
    return model


def callback_of(trainer: Trainer, kind: type[Kind]) -> Kind | None:
    """Return the first callback of this kind that a Trainer has; None if it has none."""
    handler = getattr(trainer, "callback_handler", None)
    those = (each for each in getattr(handler, "callbacks", ()) if isinstance(each, kind))
    return next(those, None)


def calling_trainer() -> Trainer | None:
    """Return the Trainer whose event this is.

    Callbacks get the unwrapped model, and not the Trainer.
    """
    for frame in frames_above():
        # Only look into frames of methods, and into none above the Trainer's.
        if frame.f_code.co_varnames[:1] == ("self",) and isinstance(
            frame.f_locals["self"], Trainer
        ):
            return frame.f_locals["self"]
    return None


def _have_evaluations_seen() -> None:
    """Have `evaluate` tell the callbacks of its Trainer that it begins and has ended.

    The class is wrapped, not the instance: so the method of a copied Trainer is its own.
    """
    trainer = calling_trainer()
    kinds = () if trainer is None else type(trainer).__mro__
    owner: Any = next((kind for kind in kinds if "evaluate" in vars(kind)), Trainer)
    if not getattr(owner.evaluate, "tells_callbacks", False):
        owner.evaluate = _telling(owner.evaluate)


def _telling(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(evaluate)
    def call(self: Trainer, *args: object, **kwargs: object) -> object:
        those = [
            each
            for each in self.callback_handler.callbacks
            if isinstance(each, EvaluationCallback) and not each.is_inside  # `super()` is one too
        ]
        before = [each.num_evaluations for each in those]
        event = {"model": self.model, "optimizer": self.optimizer}
        with ExitStack() as stack:
            for each in those:
                stack.enter_context(each.evaluating(self.args, self.state, **event))
            metrics = evaluate(self, *args, **kwargs)
        for each, num in zip(those, before, strict=True):
            # Inside training the next event tells it; a place in the list may have been emptied.
            is_there = any(each is one for one in self.callback_handler.callbacks)
            if is_there and each.num_evaluations == num and not inside_training():
                each.on_evaluate(self.args, self.state, self.control, **event)
        return metrics

    vars(call)["tells_callbacks"] = True
    return call
