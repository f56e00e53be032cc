"""Wraps methods of the Trainer for callbacks, where it has no event."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from trainer_plugins.callbacks._run import Kind, RunCallback, callback_of
from trainer_plugins.hf_trainer import HfTrainer

Method = Callable[..., Any]
"""A method of a Trainer, which it gets as its first argument."""


class GuardCallback(RunCallback):
    """Has nothing to do at an event, because it surrounds a method (`put_around`)."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **event: object
    ) -> None:
        self.begin_run()
        self.is_second(state)


def put_around(
    name: str, kind: type[Kind], around: Callable[..., AbstractContextManager[object]]
) -> None:
    """Surround a method of each Trainer that has a callback of this kind.

    Args:
        name: the method.
        kind: the class of the callback.
        around: gets the callback, the Trainer and the arguments of the call.
    """
    wrap_once(name, kind, lambda method: _surrounded(method, kind, around))


def wrap_once(
    name: str, kind: type, wrap: Callable[[Method], Method], owner: type = Trainer
) -> None:
    """Wrap a method of `transformers.Trainer`, or a subclass, for a class of callbacks.

    The class is wrapped, once in a process, and not the instance: so the methods of a copied
    Trainer are its own, a callback that is added late counts, and a Trainer without such a callback
    is left alone.
    """
    method = getattr(owner, name)
    known: frozenset[type] = getattr(method, "wrapped_for", frozenset())
    if kind not in known:
        ours = functools.wraps(method)(wrap(method))
        vars(ours)["wrapped_for"] = known | {kind}
        setattr(owner, name, ours)


def _surrounded(
    method: Method, kind: type[Kind], around: Callable[..., AbstractContextManager[object]]
) -> Method:
    def call(self: HfTrainer, *args: object, **kwargs: object) -> object:
        callback = callback_of(self, kind)
        with around(callback, self, *args, **kwargs) if callback else nullcontext():
            return method(self, *args, **kwargs)

    return call
