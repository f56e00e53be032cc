"""Finality: check that this model's gradients are added to a leaf once in a pass.

A retry after half a pass rests on it; `marks.py` says why. Two things break it: a module that runs
backward passes inside its own, as tiled layers do, and a weight that is used twice under reentrant
checkpointing, which runs one backward pass for each use.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from trainer_plugins.survival.attempt.attempt import DidNotFit, attempt
from trainer_plugins.survival.exact.losses import bare_model

_PROBED_NUMBERS = 1 << 20


def what_is_never_final(model: nn.Module, loss: Callable[[], torch.Tensor]) -> str:
    """Say why a backward pass that failed half way cannot be resumed; empty if it can.

    It costs a small forward and backward pass.

    Args:
        model: the model without a wrapper that reaches other ranks.
        loss: computes the loss of a short example. The caller restores the random numbers that it
            draws.
    """

    def work() -> list[str]:
        with without_reentry(model), torch.enable_grad():
            # `grad` accumulates nothing itself, and goes through every layer.
            torch.autograd.grad(loss(), small_parameters(model), allow_unused=True)
            return [name for name, p in model.named_parameters() if p.grad is not None]

    with gradients_aside(model), Watch(model) as watch:
        accumulated = attempt(work)
    if isinstance(accumulated, DidNotFit):
        return f"there was no room to see which gradients are final ({accumulated.first_line})"
    if accumulated:
        return (
            f"the gradient of `{accumulated[0]}` is accumulated inside a backward pass, by a "
            "module's own"
        )
    if is_reentrant(model) and (shared := _shared(model, watch)):
        return (
            f"`{shared}` is used more than once under reentrant checkpointing, which finishes its "
            'gradient in parts: pass gradient_checkpointing_kwargs={"use_reentrant": False}'
        )
    return ""


def small_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Choose small parameters of every depth: norms, biases, adapters.

    Their gradients show every coupling, and cost little.
    """
    chosen: list[nn.Parameter] = []
    room = _PROBED_NUMBERS
    for parameter in sorted((p for p in model.parameters() if p.requires_grad), key=_num_numbers):
        room -= _num_numbers(parameter)
        if room < 0 and chosen:
            break
        chosen.append(parameter)
    return chosen


def _num_numbers(parameter: nn.Parameter) -> int:
    """Return the size of the whole parameter; ZeRO-3 keeps only a part of it here."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


class Watch:
    """Watches passes: how often each parameter is used in a pass, and whether under autocast."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._uses, self._num_passes = model, Counter[nn.Parameter](), 0
        self.is_autocast = False

    def is_used_twice(self, parameter: nn.Parameter) -> bool:
        """Tell whether one pass uses a parameter more than once."""
        return self._uses[parameter] > self._num_passes

    def __enter__(self) -> "Watch":
        self._hooks = [
            module.register_forward_pre_hook(self._see) for module in self._model.modules()
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _see(self, module: nn.Module, _: object) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # checkpointing computes it again, in a backward pass
        self._uses.update(module.parameters(recurse=False))
        self._num_passes += module is self._model
        device = next((p.device.type for p in module.parameters(recurse=False)), None)
        self.is_autocast |= device is not None and torch.is_autocast_enabled(device)


@contextmanager
def gradients_aside(model: nn.Module) -> Iterator[None]:
    """Put the gradients away for a while, and drop what is accumulated inside."""
    aside = [(p, p.grad) for p in model.parameters()]
    for p, _ in aside:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in aside:
            p.grad = gradient


@contextmanager
def without_reentry(model: nn.Module) -> Iterator[None]:
    """Replace reentrant checkpointing by the other kind for a while.

    `torch.autograd.grad` does not pass through the reentrant kind.
    """
    before: list[tuple[Any, Any]] = [
        (m, m._gradient_checkpointing_func)
        for m in model.modules()
        if _reenters(m) and hasattr(m, "_gradient_checkpointing_func")
    ]
    for module, function in before:
        kept = {**getattr(function, "keywords", {}), "use_reentrant": False}
        module._gradient_checkpointing_func = partial(getattr(function, "func", function), **kept)
    try:
        yield
    finally:
        for module, function in before:
            module._gradient_checkpointing_func = function


def _shared(model: nn.Module, watch: Watch) -> str | None:
    base = bare_model(model)
    ends = [
        get()
        for name in ("get_input_embeddings", "get_output_embeddings")
        if (get := getattr(base, name, None))
    ]
    # These may be tied, and no checkpoint is around them.
    outside = {p for end in ends if end is not None for p in end.parameters()}
    often = [
        n
        for n, p in model.named_parameters()
        if p.requires_grad and p not in outside and watch.is_used_twice(p)
    ]
    return often[0] if often else None


def is_reentrant(model: nn.Module) -> bool:
    """Tell whether a model computes activations again by reentrant checkpointing."""
    return any(map(_reenters, model.modules()))


def _reenters(module: nn.Module) -> bool:
    function = getattr(module, "_gradient_checkpointing_func", None)
    is_on = getattr(module, "gradient_checkpointing", False)
    return bool(is_on and getattr(function, "keywords", {}).get("use_reentrant", True))
