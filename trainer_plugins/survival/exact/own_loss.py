"""Own loss: whether a model's loss comes from the code of its class, or from a user's.

`losses.py` goes by the class of a model. A forward hook, a `forward` on the instance, a patched
class or an entry of LOSS_MAPPING can give another loss under the same name. A measurement may miss
that: a loss that is weighted by classes adds up on rows that happen to be of one class. What
libraries put there (accelerate for mixed precision, PEFT, Liger, DeepSpeed) keeps the loss.
"""

import functools
import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING

LIBRARIES = (
    *(
        "accelerate",
        "bitsandbytes",
        "deepspeed",
        "kernels",
        "liger_kernel",
        "peft",
        "torch",
        "torchao",
    ),
    *("trainer_plugins", "transformer_engine", "transformers", "trl", "wandb"),
)
"""Packages whose code keeps a model's loss, and whose modules keep no state of a run."""


def what_replaces_the_loss(model: nn.Module) -> str:
    """Say what code of a user computes, or may change, a model's loss; empty if none does."""
    for module in _around_the_loss(model):
        kind = type(module).__name__
        for hook in module._forward_hooks.values():
            if is_foreign(hook):
                return f"a forward hook of {kind} ({_name(hook)}) may set another loss"
        own = vars(module).get("forward")
        if own is not None and any(is_foreign(function) for function in _chain(own)):
            return f"the forward of this {kind} was replaced by {_name(own)}"
        owner = next(c for c in type(module).__mro__ if "forward" in vars(c))
        patched = owner.__module__.partition(".")[0] in LIBRARIES
        if patched and any(is_foreign(function) for function in _chain(vars(owner)["forward"])):
            return f"{owner.__name__}.forward was replaced by {_name(vars(owner)['forward'])}"
    loss_type = getattr(module, "loss_type", None)
    if loss_type is None:
        return ""
    if loss_type in LOSS_MAPPING and is_foreign(LOSS_MAPPING[loss_type]):
        return (
            f"the entry {loss_type!r} of transformers' LOSS_MAPPING is "
            f"{_name(LOSS_MAPPING[loss_type])}"
        )
    if not any(str(loss_type) in c.__name__ or _sets(c, loss_type) for c in type(module).__mro__):
        return (
            f"the loss_type {loss_type!r} of {type(module).__name__} is not the one of its class, "
            "and was set"
        )
    return ""


def _sets(owner: type, loss_type: object) -> bool:
    """Tell whether a class of transformers sets that `loss_type` itself, as T5Gemma does."""
    if not owner.__module__.startswith("transformers.models."):
        return False
    try:
        return f'loss_type = "{loss_type}"' in inspect.getsource(owner)
    except OSError:  # its source is not installed
        return False


def _around_the_loss(model: nn.Module) -> Iterator[nn.Module]:
    """Give the modules that hand the loss on, from the outermost to the one that computes it."""
    yield model
    inner: Any = model
    if hasattr(inner, "get_base_model"):  # PEFT's wrapper, and what it wraps
        tuner, base = inner.base_model, inner.get_base_model()
        if tuner is not base:
            yield tuner
        yield base


def _chain(function: object) -> Iterator[object]:
    """Give a function, and those that it wraps, as far as `__wrapped__` tells."""
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        function = getattr(function, "__func__", function)
        yield function.func if isinstance(function, functools.partial) else function
        function = getattr(function, "__wrapped__", None)


def is_foreign(function: object) -> bool:
    """Tell whether a function comes from none of the libraries that keep the loss."""
    return _home(function).partition(".")[0] not in LIBRARIES


def _home(function: object) -> str:
    """Return the module in which a function was written.

    After `functools.wraps`, `__module__` is that of another function.
    """
    function = getattr(function, "__func__", function)
    function = function.func if isinstance(function, functools.partial) else function
    names = getattr(function, "__globals__", None)
    return str(names["__name__"]) if names is not None else type(function).__module__


def _name(function: object) -> str:
    named = next((one for one in _chain(function) if is_foreign(one)), function)
    return f"{_home(named)}.{getattr(named, '__qualname__', type(named).__name__)}"
