"""Delegated: whether a user's `compute_loss` is nothing but a call of a library's.

LLaMA-Factory's SFT and axolotl override it for losses that are seldom switched on, and call
`super()` else. Which way a call goes is seen only while it runs, so each one is watched: a loss
that did not come from the library as it is, for the same rows, is not divided.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.survival.attempt.marks import GradientMark
from trainer_plugins.survival.exact.layouts import IndivisibleError, Inputs
from trainer_plugins.survival.exact.own_loss import is_foreign

_LIBRARIES = ("transformers", "trl")
_AMONG_RANKS = {"all_reduce", "all_gather", "all_gather_object", "reduce", "barrier", "broadcast"}


def whose_loss(trainer: HfTrainer, compute_loss: Callable[..., Any]) -> type | None:
    """Find the library's class that a user's `compute_loss` may hand everything on to.

    Returns:
        The class; None if the method never calls another `compute_loss`, or could not be watched.
    """
    if isinstance(compute_loss, Delegation):
        compute_loss = compute_loss.original
    function = getattr(compute_loss, "__func__", None)
    if function is None or function is not getattr(type(trainer), "compute_loss", None):
        return None  # put on the instance
    for kind in type(trainer).__mro__:
        own = vars(kind).get("compute_loss")
        if kind.__module__.partition(".")[0] in _LIBRARIES:
            if own is not None:
                return None if is_foreign(own) else kind
        elif "_compute_loss" in vars(kind):  # of TRL's own two, the inner one
            return None
        elif own is not None:
            names = {*getattr(inspect.unwrap(own), "__code__", _nothing.__code__).co_names}
            # Pieces are of one rank: what it exchanged for each would have nobody to meet.
            is_shared = trainer.args.world_size > 1 and bool(names & _AMONG_RANKS)
            if "compute_loss" not in names or is_shared:
                return None
    return None


def _nothing() -> None:
    """Stand for a method that was not written in Python."""


class Delegation:
    """Calls a user's `compute_loss`, and notes whether it returned what the library computed.

    Args:
        trainer: the Trainer.
        original: its `compute_loss`, bound.
        known: the library's class, from `whose_loss`.
    """

    def __init__(self, trainer: HfTrainer, original: Callable[..., Any], known: type) -> None:
        self._trainer, self.original = trainer, original
        self._known: Any = known
        self.__module__ = original.__module__
        self._parameters: WeakKeyDictionary[nn.Module, tuple[nn.Parameter, ...]]
        self._parameters = WeakKeyDictionary()
        self.why_not = ""
        """Why the loss of the last call is the user's own; empty if it is the library's."""

    def __call__(self, model: nn.Module, inputs: Inputs, **options: Any) -> Any:
        given = {name: (value, _num_changes(value)) for name, value in inputs.items()}
        before = GradientMark(self._parameters_of(model))
        calls: list[tuple[bool, Any, int]] = []

        def note(arguments: dict[str, Any], compute: Callable[[], Any]) -> Any:
            got = arguments["inputs"]
            is_same = arguments["model"] is model and _is_same(got, given)
            num_items = options.get("num_items_in_batch")
            is_same &= arguments.get("num_items_in_batch") is num_items
            result = compute()
            calls.append((is_same, _loss(result), _num_changes(_loss(result))))
            return result

        with self._watching(note):
            result = self.original(model, inputs, **options)
        is_changed = any(_num_changes(value) != version for value, version in given.values())
        why = _why_not(calls, _loss(result), is_changed or bool(before.changed()))
        name = type(self._trainer).__name__
        self.why_not = why and (
            f"{name}.compute_loss is not known to be a sum over examples: it {why} "
            f"{self._known.__name__}.compute_loss"
        )
        return result

    @contextmanager
    def _watching(self, note: Callable[..., Any]) -> Iterator[None]:
        """Replace the method of the library's class for one call: `super()` looks nowhere else."""
        compute_loss: Any = vars(self._known)["compute_loss"]
        signature = inspect.signature(compute_loss)

        @functools.wraps(compute_loss)
        def watched(trainer: HfTrainer, *args: Any, **kwargs: Any) -> Any:
            compute = functools.partial(compute_loss, trainer, *args, **kwargs)
            if trainer is not self._trainer:
                return compute()
            return note(signature.bind(trainer, *args, **kwargs).arguments, compute)

        self._known.compute_loss = watched
        try:
            yield
        finally:
            if vars(self._known)["compute_loss"] is watched:
                self._known.compute_loss = compute_loss

    def _parameters_of(self, model: nn.Module) -> tuple[nn.Parameter, ...]:
        if model not in self._parameters:  # listed once: it takes milliseconds
            self._parameters[model] = tuple(model.parameters())
        return self._parameters[model]


def check_delegated(compute_loss: Callable[..., Any]) -> None:
    """Check that the loss just computed, of a part, was the library's.

    Raises:
        IndivisibleError: it was the user's own.
    """
    if why := why_not_delegated(compute_loss):
        raise IndivisibleError(why)


def why_not_delegated(compute_loss: Callable[..., Any]) -> str:
    """Say why the loss just computed was the user's own; empty if it was the library's."""
    return compute_loss.why_not if isinstance(compute_loss, Delegation) else ""


def _why_not(calls: list[tuple[bool, Any, int]], loss: Any, is_changed: bool) -> str:
    if len(calls) != 1:
        return "calls, this time, more than once" if calls else "does not call, this time,"
    is_same, theirs, version = calls[0]
    if not is_same:
        return "gives another model, rows or number of items to"
    if (
        loss is not theirs
        or _num_changes(loss) != version
        or getattr(loss, "_backward_hooks", None)
    ):
        return "returns another loss than"
    return "changes rows or gradients beside" if is_changed else ""


def _is_same(got: Inputs, given: dict[str, tuple[Any, int]]) -> bool:
    return got.keys() == given.keys() and all(
        got[name] is value and _num_changes(value) == version
        for name, (value, version) in given.items()
    )


def _loss(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _num_changes(value: object) -> int:
    """Return how often a tensor was changed in place."""
    return value._version if torch.is_tensor(value) and not value.is_inference() else 0
