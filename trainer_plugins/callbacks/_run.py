"""RunCallback: what callbacks share: the run's device and timeline, and errors that end no run."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TypeVar
from uuid import uuid4
from weakref import ref

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from trainer_plugins.callbacks._order import keep_first_place
from trainer_plugins.devices import Device, open_device
from trainer_plugins.hf_trainer import HfArguments, HfState, HfTrainer
from trainer_plugins.record.timeline import Timeline, timeline_of_run
from trainer_plugins.record.webhook import webhook_of_run
from trainer_plugins.upkeep.agreement import StepEndVote
from trainer_plugins.upkeep.frames import frames_above

logger = logging.getLogger(__name__)

Kind = TypeVar("Kind", bound=TrainerCallback)

_logged: set[str] = set()
"""Messages that a process logs only once, by any callback."""


class NoModelError(TypeError):
    """Says that a Trainer passes something other than a model to its events, as setfit's does."""


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
        self.undo = ExitStack()  # what `end_run` undoes, as callbacks of this stack

    def begin_run(self) -> None:
        """Forget the previous run, which may have raised: a callback may serve several Trainers."""
        self.end_run()
        self.at_rest()

    def end_run(self) -> None:
        """Undo what was done for the run. A second call does nothing."""
        self.undo.close()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **event: object
    ) -> None:
        self.end_run()

    def vote_every(self, num_steps: int, args: HfArguments) -> StepEndVote:
        """Return a vote, every `num_steps` steps, of all ranks that have this callback."""
        question = f"{type(self).__name__} (every {num_steps} step{'s' * (num_steps > 1)})"
        vote = StepEndVote(question, args.ddp_timeout)
        self.undo.callback(vote.leave)
        return vote

    def device_for(self, args: HfArguments) -> Device | None:
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

    def device_if_first(self, args: HfArguments, state: HfState) -> Device | None:
        """Return the device; None if it cannot be read, or another callback has precedence."""
        return None if self.is_second(state) else self.device_for(args)

    def timeline_for(self, args: HfArguments) -> Timeline:
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
            if str(error) not in _logged:
                _logged.add(str(error))
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

    def is_second(self, state: HfState) -> bool:
        """Return whether another callback of this class has precedence in this run.

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


def model_of(event: Mapping[str, object]) -> nn.Module:
    """Return the model that the Trainer passes to an event.

    Raises:
        NoModelError: there is none.
    """
    model = event.get("model")
    if not isinstance(model, nn.Module):
        raise NoModelError(
            f"this Trainer passes a {type(model).__name__} to its callbacks, which is no nn.Module:"
            " callbacks that need the model do nothing in its runs"
        )
    return model


def callback_of(trainer: HfTrainer, kind: type[Kind]) -> Kind | None:
    """Return the first callback of this kind that a Trainer has; None if it has none."""
    handler = getattr(trainer, "callback_handler", None)  # none yet inside its constructor
    found = (each for each in getattr(handler, "callbacks", ()) if isinstance(each, kind))
    return next(found, None)


def calling_trainer() -> HfTrainer | None:
    """Return the Trainer whose event this is: callbacks get its unwrapped model, but not itself."""
    for frame in frames_above():
        # Only look into frames of methods, and into none above the Trainer's.
        if frame.f_code.co_varnames[:1] == ("self",):
            owner = frame.f_locals["self"]
            if isinstance(owner, Trainer):
                trainer: HfTrainer = owner
                return trainer
    return None
