"""RunCallback, and the code that all callbacks share: device, timeline, wrapped methods."""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar
from uuid import uuid4

from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_callback import CallbackHandler

from trainer_plugins.devices import Device
from trainer_plugins.devices.accelerator import open_device
from trainer_plugins.finding import Finding
from trainer_plugins.hf_trainer import HfArguments, HfState, HfTrainer
from trainer_plugins.record.timeline import Remark, Timeline, timeline_of_run
from trainer_plugins.upkeep.agreement import StepEndVote
from trainer_plugins.upkeep.stack import frames_above

logger = logging.getLogger(__name__)

Kind = TypeVar("Kind", bound=TrainerCallback)

Event = Mapping[str, object]  # the Trainer's keyword arguments to an event: the model, ...
Method = Callable[..., Any]  # a method of a Trainer, which is its first argument


class NoModelError(TypeError):
    """The Trainer passes something other than a model to its events, as setfit's does."""


class RunCallback(TrainerCallback):
    """The base of our callbacks: a device and a timeline, passed in or else the run's own."""

    def __init__(self, device: Device | None = None, timeline: Timeline | None = None) -> None:
        self._given_device, self._given_timeline = device, timeline
        self._number = uuid4().int  # shared with copies, for which `id` would differ
        self._has_failed = False
        wrap_once("train", RunCallback, _end_if_it_raises)
        self.reset()

    def reset(self) -> None:
        """Reset the state of one run, for a copy too. Subclasses define such attributes here."""
        self._device, self._timeline = self._given_device, self._given_timeline
        self._has_tried_to_open = False
        self.undo = ExitStack()  # the cleanups that `end_run` performs

    def begin_run(self) -> None:
        """Forget the previous run, which may have raised: a callback may serve several Trainers."""
        self.end_run()
        self.reset()

    def end_run(self) -> None:
        """Clean up after the run. A second call does nothing."""
        self.undo.close()

    def run_raises(self) -> None:
        """Clean up after an error, or Ctrl-C, that leaves `train`: no more events will come."""
        self.end_run()

    def on_train_begin(self, args: HfArguments, state: HfState, *_: object, **event: Any) -> None:
        self.begin_run()
        if not self.is_second(state):
            self.run_begins(args, state, event)

    def run_begins(self, args: HfArguments, state: HfState, event: Event) -> None:
        """Act when training begins, unless another callback of this class takes precedence."""

    def on_train_end(self, args: HfArguments, state: HfState, *_: object, **event: object) -> None:
        self.end_run()

    def vote_every(self, num_steps: int, args: HfArguments) -> StepEndVote:
        """Return a vote, held every `num_steps` steps, of all ranks that have this callback."""
        question = f"{type(self).__name__} (every {num_steps} step{'s' * (num_steps > 1)})"
        vote = StepEndVote(question, args.ddp_timeout)
        self.undo.callback(vote.leave)
        return vote

    def device_for(self, args: HfArguments) -> Device | None:
        """Return the device, opened on first use; None, logged once, if it cannot be read."""
        # Not in on_train_begin: a callback added late, or for evaluate() alone, does not get it.
        if self._device is None and not self._has_tried_to_open:
            self._has_tried_to_open = True
            with self.harmless():
                try:
                    self._device = open_device(args.device)
                except ValueError as error:
                    logger.warning("%s does nothing in this run: %s", type(self).__name__, error)
        return self._device

    def device_if_first(self, args: HfArguments, state: HfState) -> Device | None:
        """Return the device; None if it cannot be read or another callback takes precedence."""
        return None if self.is_second(state) else self.device_for(args)

    def timeline_for(self, args: HfArguments) -> Timeline:
        if self._timeline is None:
            self._timeline = timeline_of_run(args.output_dir, args.process_index)
        if self._timeline.listener is None:
            from trainer_plugins.record.webhook import webhook_of_run  # slow to import

            self._timeline.listener = webhook_of_run(args.output_dir, args.process_index)
        return self._timeline

    def remark(self, args: HfArguments, step: int, finding: Finding) -> None:
        """Log a finding and add it to the timeline."""
        own_logger = logging.getLogger(type(self).__module__)
        own_logger.log(finding.severity, "step %d: %s", step, finding)
        with self.harmless():
            self.timeline_for(args).add(Remark(step=step, finding=finding))

    @contextmanager
    def harmless(self) -> Iterator[None]:
        """Guard code that runs inside training: log the first exception and let training go on."""
        # The one place that catches everything: a monitor must not end a run that costs days. The
        # callback keeps running too: if one rank fell silent, the others would wait for its votes.
        try:
            yield
        except NoModelError as error:
            logger.warning_once(str(error))  # type: ignore[attr-defined] # transformers adds it
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                logger.exception("%s failed; training continues (logged once)", type(self).__name__)

    def is_second(self, state: HfState) -> bool:
        """Return whether another callback of this class takes precedence: each would see half."""
        # All callbacks of a run share the state, and attributes beside its fields are never saved.
        name, callbacks = type(self).__name__, vars(state).setdefault("_memory_callbacks", {})
        numbers = callbacks.setdefault(name, [])
        if self._number not in numbers:
            numbers.append(self._number)
            is_twice = self._keep_first_place()
            if is_twice or numbers[0] != self._number:
                logger.warning("%s was added twice: the second one has no effect. Remove one", name)
        return bool(numbers[0] != self._number)

    def _keep_first_place(self) -> bool:
        """Blank out repeats of this callback in its Trainer's list; return whether it had any."""
        callbacks = getattr(_find_caller(CallbackHandler), "callbacks", [])
        numbers = [getattr(one, "_number", None) for one in callbacks]
        places = [place for place, number in enumerate(numbers) if number == self._number]
        for place in places[1:]:
            # The list is being iterated: removing an item would skip the next.
            callbacks[place] = TrainerCallback()
        return len(places) > 1

    def __getstate__(self) -> dict[str, object]:
        """Return the state for a copy, which belongs to no Trainer and no run."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.reset()
        return copy.__dict__


def model_of(event: Event) -> nn.Module:
    """Return the model that the Trainer passes to an event. Raises NoModelError."""
    model = event.get("model")
    if not isinstance(model, nn.Module):
        raise NoModelError(
            f"this Trainer passes a {type(model).__name__} to its callbacks, which is not an"
            " nn.Module: callbacks that need the model do nothing in this run"
        )
    return model


def callback_of(trainer: HfTrainer, kind: type[Kind]) -> Kind | None:
    """Return a Trainer's first callback of this kind."""
    handler = getattr(trainer, "callback_handler", None)  # none yet inside its constructor
    found = (each for each in getattr(handler, "callbacks", ()) if isinstance(each, kind))
    return next(found, None)


def calling_trainer() -> HfTrainer | None:
    """Return the Trainer that fired this event: callbacks get only its unwrapped model."""
    trainer: HfTrainer | None = _find_caller(Trainer)
    return trainer


def _find_caller(kind: type) -> Any:
    """Return the nearest object of a class, one of whose methods called this; None without one."""
    for frame in frames_above():
        # Only look at frames of methods: reading the variables of others would keep them alive.
        if frame.f_code.co_varnames[:1] == ("self",) and isinstance(frame.f_locals["self"], kind):
            return frame.f_locals["self"]
    return None


def move_before_trackers(callback: TrainerCallback) -> bool:
    """During an event, move a callback before the trackers of `report_to`; False without a list."""
    callbacks = getattr(_find_caller(CallbackHandler), "callbacks", [])
    if not any(one is callback for one in callbacks):
        return False
    place = callbacks.index(callback)
    trackers = tuple(INTEGRATION_TO_CALLBACK.values())
    first = next((index for index, one in enumerate(callbacks) if isinstance(one, trackers)), place)
    # The list is being iterated, at this callback: moving it forward skips and repeats nothing.
    if first < place:
        callbacks.insert(first, callbacks.pop(place))
    return True


def put_around(
    name: str, kind: type[Kind], around: Callable[..., AbstractContextManager[object]]
) -> None:
    """Wrap a method that has no event, for each Trainer that has a callback of this kind."""

    def run_surrounded(method: Method, trainer: HfTrainer, *args: Any, **kwargs: Any) -> object:
        callback = callback_of(trainer, kind)
        with around(callback, trainer, *args, **kwargs) if callback else nullcontext():
            return method(trainer, *args, **kwargs)

    wrap_once(name, kind, run_surrounded)


def wrap_once(name: str, kind: type, wrapper: Method, owner: type = Trainer) -> None:
    """Replace a method of a Trainer's class, once per class of callbacks.

    A call becomes `wrapper(method, trainer, *args, **kwargs)`.
    """
    # We wrap the class, not the instance: that spares copied Trainers and includes later ones.
    method = getattr(owner, name)
    known: frozenset[type] = getattr(method, "wrapped_for", frozenset())
    if kind not in known:

        @functools.wraps(method)
        def call(self: HfTrainer, *args: object, **kwargs: object) -> object:
            return wrapper(method, self, *args, **kwargs)

        vars(call)["wrapped_for"] = known | {kind}
        setattr(owner, name, call)


def _end_if_it_raises(train: Method, trainer: HfTrainer, *args: Any, **kwargs: Any) -> object:
    try:
        return train(trainer, *args, **kwargs)
    except BaseException:
        for each in trainer.callback_handler.callbacks:
            if isinstance(each, RunCallback):
                with each.harmless():
                    each.run_raises()
        raise
