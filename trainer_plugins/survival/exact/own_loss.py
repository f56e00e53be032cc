"""Own loss: decides whether a loss comes from a library's code or from a user's.

Hooks, patches and entries of LOSS_MAPPING can put another loss under a known name, which a
measurement may miss. A user's `compute_loss` may only call a library's, as LLaMA-Factory's SFT and
axolotl do: we watch each call, and do not divide a loss that did not come from the library.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.patched import Patches
from trainer_plugins.survival.attempt.users_code import (
    is_library,
    is_users_function,
    name_of,
    walk_wrapped,
)
from trainer_plugins.survival.exact.finality import GradientMark
from trainer_plugins.survival.exact.shares import Inputs
from trainer_plugins.wrapped import unwrap

_LIBRARIES = ("transformers", "trl")
_AMONG_RANKS = {"all_reduce", "all_gather", "all_gather_object", "reduce", "barrier", "broadcast"}


def find_replaced_loss(model: nn.Module) -> str:
    """Name the user's code that computes, or may change, a model's loss; empty if there is none."""
    for module in _around_the_loss(model):
        kind = type(module).__name__
        for hook in module._forward_hooks.values():
            if is_users_function(hook):
                return f"a forward hook of {kind} ({name_of(hook)}) may set another loss"
        own = vars(module).get("forward")
        if own is not None and any(map(is_users_function, walk_wrapped(own))):
            return f"the forward of this {kind} was replaced by {name_of(own)}"
        owner = next(c for c in type(module).__mro__ if "forward" in vars(c))
        forward = vars(owner)["forward"]
        if is_library(owner.__module__) and any(map(is_users_function, walk_wrapped(forward))):
            return f"{owner.__name__}.forward was replaced by {name_of(forward)}"
    loss_type = getattr(module, "loss_type", None)
    if loss_type in LOSS_MAPPING and is_users_function(LOSS_MAPPING[loss_type]):
        return (
            f"the entry {loss_type!r} of transformers' LOSS_MAPPING is "
            f"{name_of(LOSS_MAPPING[loss_type])}"
        )
    return ""


def _around_the_loss(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that pass the loss on, from the outermost to the one that computes it."""
    inner: Any = unwrap(model)
    yield inner
    if hasattr(inner, "get_base_model"):  # PEFT's wrapper, and the model inside
        tuner, base = inner.base_model, inner.get_base_model()
        if tuner is not base:
            yield tuner
        yield base


def find_owner(trainer: HfTrainer, compute_loss: Callable[..., Any]) -> type | None:
    """Find the library class that a user's `compute_loss` may call, if it can be watched."""
    if isinstance(compute_loss, Delegation):
        compute_loss = compute_loss.original
    function = getattr(compute_loss, "__func__", None)
    if function is None or function is not getattr(type(trainer), "compute_loss", None):
        return None  # set on the instance
    for kind in type(trainer).__mro__:
        own = vars(kind).get("compute_loss")
        if kind.__module__.partition(".")[0] in _LIBRARIES:
            if own is not None:
                return None if is_users_function(own) else kind
        elif "_compute_loss" in vars(kind):  # of TRL's two, the inner one
            return None
        elif own is not None:
            code = getattr(inspect.unwrap(own), "__code__", None)
            names = set(code.co_names) if code is not None else set()
            # Pieces belong to one rank: no other rank would answer an exchange for each of them.
            is_shared = trainer.args.world_size > 1 and bool(names & _AMONG_RANKS)
            if "compute_loss" not in names or is_shared:
                return None
    return None


# Whether it got the same model, rows and number of items; its loss; changes of that so far.
_Call = tuple[bool, Any, int]


class Delegation:
    """Calls a user's `compute_loss`, and checks whether it returned the library's result."""

    def __init__(self, trainer: HfTrainer, original: Callable[..., Any], known: type) -> None:
        self._trainer, self.original = trainer, original
        self._known: Any = known
        self.__module__ = original.__module__
        self._parameters = WeakKeyDictionary[nn.Module, tuple[nn.Parameter, ...]]()
        self.why_not = ""  # why the last loss is the user's own; empty if it is the library's

    def __call__(self, model: nn.Module, inputs: Inputs, **options: Any) -> Any:
        if not isinstance(inputs, Mapping):  # such batches are never divided
            return self.original(model, inputs, **options)
        given = {name: (value, _num_changes(value)) for name, value in inputs.items()}
        if model not in self._parameters:  # listing them takes milliseconds, so do it once
            self._parameters[model] = tuple(model.parameters())
        before = GradientMark(self._parameters[model])
        calls: list[_Call] = []

        def compute_watched(
            compute_loss: Callable[..., Any], trainer: HfTrainer, *args: Any, **kwargs: Any
        ) -> Any:
            got = inspect.signature(compute_loss).bind(trainer, *args, **kwargs).arguments
            is_same = (
                got["model"] is model
                and _is_same(got["inputs"], given)
                and got.get("num_items_in_batch") is options.get("num_items_in_batch")
            )
            result = compute_loss(trainer, *args, **kwargs)
            if trainer is self._trainer:
                calls.append((is_same, _loss(result), _num_changes(_loss(result))))
            return result

        with Patches(keeps_later=True) as patches:  # `super()` looks nowhere else
            patches.wrap(self._known, "compute_loss", compute_watched)
            result = self.original(model, inputs, **options)
        is_changed = any(_num_changes(value) != version for value, version in given.values())
        why = _explain_refusal(calls, _loss(result), is_changed or bool(before.find_changed()))
        name = type(self._trainer).__name__
        self.why_not = why and (
            f"{name}.compute_loss is not known to be a sum over examples: it "
            + why.format(f"{self._known.__name__}.compute_loss")
        )
        return result


def _explain_refusal(calls: list[_Call], loss: Any, is_changed: bool) -> str:
    if len(calls) != 1:
        return "called {} more than once in this step" if calls else "did not call {} in this step"
    ((is_same, its_loss, num_changes),) = calls
    if not is_same:
        return "gave another model, rows or number of items to {}"
    is_returned = loss is its_loss and _num_changes(loss) == num_changes
    if not is_returned or getattr(loss, "_backward_hooks", None):
        return "returned another loss than {}"
    return "changed rows or gradients besides calling {}" if is_changed else ""


def _is_same(got: Inputs, given: dict[str, tuple[Any, int]]) -> bool:
    return got.keys() == given.keys() and all(
        got[name] is value and _num_changes(value) == version
        for name, (value, version) in given.items()
    )


def _loss(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _num_changes(value: object) -> int:
    return value._version if torch.is_tensor(value) and not value.is_inference() else 0
