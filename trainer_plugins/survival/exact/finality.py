"""Finality: decides which gradients a backward pass had finished when it failed.

Autograd adds to a leaf's `.grad` once per backward pass, when the sum of all contributions is
complete, so a `.grad` holds all of this pass or none of it (`holds_here` tests that). Three things
break it: hooks that consume gradients (`refusals.py`), a module that runs backward passes inside
its own, and a weight used twice under reentrant checkpointing (both: `explain_never_final`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from trainer_plugins.advice import NON_REENTRANT, Door
from trainer_plugins.patched import Patches
from trainer_plugins.survival.attempt.attempt import DidNotFit, attempt
from trainer_plugins.wrapped import base_model

_PROBED_NUMBERS = 1 << 20

# A third faster than a comprehension: each micro-batch reads all gradients.
_gradient_of, _version_of = attrgetter("grad"), attrgetter("_version")


class GradientMark:
    """Marks a moment before a backward pass, to determine later which gradients changed."""

    # It keeps that moment's gradients alive, so it must not outlive the backward pass.

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        # Lists of tensors and numbers: a tuple per parameter would trigger Python's collector.
        self._parameters = tuple(parameters)
        self._gradients = [*map(_gradient_of, self._parameters)]
        self._versions = [*map(_version_of, self._there())]

    def find_changed(self) -> set[nn.Parameter]:
        before = zip(self._parameters, self._gradients, strict=True)
        replaced = {p for p, g in before if p.grad is not g}
        versions = zip(self._there(), self._versions, strict=True)
        written = {id(g) for g, version in versions if g._version != version}
        before = zip(self._parameters, self._gradients, strict=True)
        return replaced | {p for p, g in before if id(g) in written}

    def _there(self) -> list[torch.Tensor]:
        return [g for g in self._gradients if g is not None]

    def new_bytes(self) -> int:
        before = zip(self._parameters, self._gradients, strict=True)
        return sum(p.grad.nbytes for p, g in before if g is None and p.grad is not None)


@contextmanager
def frozen(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Compute no gradient for these parameters; the block must hold forward and backward."""
    changed = [p for p in parameters if p.requires_grad]
    for p in changed:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in changed:
            p.requires_grad_(True)


def holds_here() -> bool:
    """Test on this torch whether a backward pass that failed half way can be finished."""

    def fail(_: object) -> None:
        raise RuntimeError("half way")

    early, late = (nn.Parameter(torch.ones(2)) for _ in range(2))
    # Both have a gradient after this, so versions must show the change.
    torch.autograd.backward((early * late).sum())
    mark = GradientMark((early, late))
    hidden = early * 2
    torch.autograd.graph.register_multi_grad_hook((hidden,), fail)
    try:
        torch.autograd.backward((hidden * late).sum())
    except RuntimeError:
        halfway = mark.find_changed()
    else:
        return False
    with frozen(halfway):
        torch.autograd.backward((early * 2 * late).sum())
    return halfway == {late} and all(
        p.grad is not None and p.grad.tolist() == [3.0, 3.0] for p in (early, late)
    )


def hooks_of_gradients(model: nn.Module) -> Iterator[str]:
    """Yield every reason why hooks of parameters would see the gradients of pieces."""
    parameters = list(model.named_parameters())
    if name := next((n for n, p in parameters if _takes_gradient(p)), None):
        yield f"a hook consumes the gradient of `{name}` in the backward pass: it would get pieces"
    if name := next((n for n, p in parameters if p._backward_hooks), None):
        yield f"a hook changes the gradient of `{name}`: it would get pieces"


def _takes_gradient(parameter: nn.Parameter) -> bool:
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    # DeepSpeed's hooks add up gradients: they are made for several micro-batches.
    return any(not hook.__module__.startswith("deepspeed.") for hook in hooks.values())


def explain_never_final(model: nn.Module, loss: Callable[[], torch.Tensor]) -> str:
    """Return why a backward pass that failed half way cannot be resumed; empty if it can."""

    def work() -> list[str]:
        with replace_reentry(model), torch.enable_grad():
            # `grad` itself accumulates nothing, and passes through every layer.
            torch.autograd.grad(loss(), small_parameters(model), allow_unused=True)
            return [name for name, p in model.named_parameters() if p.grad is not None]

    with gradients_aside(model), Watch(model) as watch:
        accumulated = attempt(work)
    if isinstance(accumulated, DidNotFit):
        return f"no memory was left to check which gradients are final ({accumulated.first_line})"
    if accumulated:
        return f"a module accumulates the gradient of `{accumulated[0]}` in its own backward pass"
    if is_reentrant(model) and (shared := _find_shared(model, watch)):
        return (
            f"`{shared}` is used more than once under reentrant checkpointing, which finishes its "
            f"gradient in parts: pass {NON_REENTRANT.flag(Door.ARGUMENTS)}"
        )
    return ""


def small_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Choose small parameters at every depth: their gradients show every coupling."""
    chosen: list[nn.Parameter] = []
    room = _PROBED_NUMBERS
    for parameter in sorted((p for p in model.parameters() if p.requires_grad), key=_num_numbers):
        room -= _num_numbers(parameter)
        if room < 0 and chosen:
            break
        chosen.append(parameter)
    return chosen


def _num_numbers(parameter: nn.Parameter) -> int:
    """Return the size of the full parameter; ZeRO-3 keeps only a part of it here."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


class Watch(ExitStack):
    """Counts how often each parameter is used in a pass, and detects autocast."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model, self._uses, self._num_passes = model, Counter[nn.Parameter](), 0
        self.is_autocast = False
        for module in model.modules():
            self.enter_context(module.register_forward_pre_hook(self._see))

    def is_used_twice(self, parameter: nn.Parameter) -> bool:
        return self._uses[parameter] > self._num_passes

    def _see(self, module: nn.Module, _: object) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # checkpointing recomputes it in a backward pass
        self._uses.update(module.parameters(recurse=False))
        self._num_passes += module is self._model
        device = next((p.device.type for p in module.parameters(recurse=False)), None)
        self.is_autocast |= device is not None and torch.is_autocast_enabled(device)


@contextmanager
def gradients_aside(model: nn.Module) -> Iterator[None]:
    """Put the gradients away for a while, and drop any that accumulate inside."""
    aside = [(p, p.grad) for p in model.parameters()]
    for p, _ in aside:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in aside:
            p.grad = gradient


@contextmanager
def replace_reentry(model: nn.Module) -> Iterator[None]:
    """Replace reentrant checkpointing, which `torch.autograd.grad` cannot pass through."""
    with Patches() as patches:
        for module in filter(_reenters, model.modules()):
            function: Any = getattr(module, "_gradient_checkpointing_func", None)
            if function is not None:
                kept = {**getattr(function, "keywords", {}), "use_reentrant": False}
                instead = partial(getattr(function, "func", function), **kept)
                patches.set(module, "_gradient_checkpointing_func", instead)
        yield


def _find_shared(model: nn.Module, watch: Watch) -> str | None:
    base = base_model(model)
    outside: set[nn.Parameter] = set()  # may be tied, and are outside any checkpoint
    for name in ("get_input_embeddings", "get_output_embeddings"):
        if (get := getattr(base, name, None)) is not None and (end := get()) is not None:
            outside.update(end.parameters())
    for name, p in model.named_parameters():
        if p.requires_grad and p not in outside and watch.is_used_twice(p):
            return name
    return None


def is_reentrant(model: nn.Module) -> bool:
    """Return whether a model recomputes activations by reentrant checkpointing."""
    return any(map(_reenters, model.modules()))


def _reenters(module: nn.Module) -> bool:
    function = getattr(module, "_gradient_checkpointing_func", None)
    is_on = getattr(module, "gradient_checkpointing", False)
    return bool(is_on and getattr(function, "keywords", {}).get("use_reentrant", True))
