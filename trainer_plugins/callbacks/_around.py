"""Lets a callback stand around a method of its Trainer, where the Trainer has no event."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from trainer_plugins.callbacks._run import Kind, RunCallback, callback_of


class GuardCallback(RunCallback):
    """Has nothing of its own to do at an event: it stands around a method (`put_around`)."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self.begin_run()
        self.is_second(state)


def put_around(
    name: str, kind: type[Kind], around: Callable[..., AbstractContextManager[object]]
) -> None:
    """Have the callback of a kind, where a Trainer has one, stand around a method of that Trainer.

    The class is wrapped, once in a process, and not the instance: so the methods of a copied
    Trainer are its own, a callback that is added late counts, and a Trainer without such a callback
    is left alone.

    Args:
        name: the method.
        kind: the class of the callback.
        around: gets the callback, the Trainer and the arguments of the call.
    """
    wrap_once(name, kind, lambda method: _surrounded(method, kind, around))


def wrap_once(
    name: str, kind: type, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Wrap a method of `transformers.Trainer` for a class of callbacks, once in a process."""
    method = getattr(Trainer, name)
    known: frozenset[type] = getattr(method, "wrapped_for", frozenset())
    if kind not in known:
        ours = functools.wraps(method)(wrap(method))
        vars(ours)["wrapped_for"] = known | {kind}
        setattr(Trainer, name, ours)


def _surrounded(
    method: Callable[..., Any],
    kind: type[Kind],
    around: Callable[..., AbstractContextManager[object]],
) -> Callable[..., Any]:
    def call(self: Trainer, *args: object, **kwargs: object) -> object:
        callback = callback_of(self, kind)
        with around(callback, self, *args, **kwargs) if callback else nullcontext():
            return method(self, *args, **kwargs)

    return call
