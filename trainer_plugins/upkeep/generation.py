"""Prepares a model in training for `generate`, and drops what that leaves behind.

On a model in train mode with gradient checkpointing, `generate` silently returns wrong text: the
checkpointed layers drop `past_key_values`, but `generate` goes on feeding them one token at a time
(transformers issue #36051, `modeling_layers.py`).
"""

import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from trainer_plugins.upkeep.frames import code_of, frames_above

GenerateGuard = Callable[
    [nn.Module, tuple[object, ...], dict[str, object]], AbstractContextManager[None]
]
"""Wraps each `generate` inside training; gets the model, its arguments, and keywords to change."""

_guards: WeakKeyDictionary[nn.Module, list[tuple[GenerateGuard, bool]]] = WeakKeyDictionary()
"""The guards of each model, and whether they act outside training too."""


@contextmanager
def inference_mode_of(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode without gradient checkpointing, then restore every module."""
    modes = [(module, module.training) for module in model.modules()]
    checkpointed = list(_checkpointed(model))
    was_training = model.training
    try:
        # Use the model's own methods first: some adapters override them to merge their weights.
        model.eval()
        for module in checkpointed:
            module.gradient_checkpointing = False
        yield
    finally:
        for module in checkpointed:
            module.gradient_checkpointing = True
        model.train(was_training)
        for module, training in modes:
            module.training = training


@contextmanager
def generation_memory(model: nn.Module) -> Iterator[None]:
    """Wrap your own preview code, so that the model generates as in inference and leaves nothing.

    Inside, the model is in eval mode without gradient checkpointing; afterwards it is exactly as it
    was found, even if the block raises. Then what `generate` left behind is dropped, if anything.
    Cached memory is not released: all ranks have to agree on that, see `EvalGenerateCleanup`.
    """
    try:
        with inference_mode_of(model):
            yield
    finally:
        drop_leftovers(model)


def leftovers(model: nn.Module) -> list[tuple[Any, str]]:
    """List what `generate` has left on a model, as pairs of a module and an attribute's name.

    `_compiled_call` holds the compiled forward of a static cache, with the memory pools of its CUDA
    graphs; `_cached_continuous_batching_manager` holds a paged cache of most of the card. An
    ordinary `generate` leaves nothing (transformers 5.23).
    """
    names = ("_compiled_call", "_cached_continuous_batching_manager")
    return [(module, name) for module in model.modules() for name in names if name in vars(module)]


def drop_leftovers(model: nn.Module) -> list[str]:
    """Drop what `generate` has left on a model, and return the names of what was dropped.

    A compiled call takes the memory pools of its CUDA graphs with it; graphs of other compiled code
    are recorded again at their next run. Compiled code stays compiled. Not yet measured on a GPU.
    """
    found = leftovers(model)
    for module, name in found:
        if name == "_cached_continuous_batching_manager" and hasattr(
            module, "destroy_cached_continuous_batching_manager"
        ):
            module.destroy_cached_continuous_batching_manager()  # it also stops its thread
        vars(module).pop(name, None)
    # torch imports this only if graphs are in use.
    graphs = sys.modules.get("torch._inductor.cudagraph_trees")
    if graphs is not None and any(name == "_compiled_call" for _, name in found):
        graphs.reset_cudagraph_trees()
    if found:
        gc.collect()
    return [f"{type(module).__name__}.{name}" for module, name in found]


def guard_generate(
    model: nn.Module, guard: GenerateGuard, *, outside_training: bool = False
) -> Callable[[], None]:
    """Wrap a guard around every `model.generate` inside training; return what removes it.

    Outside `Trainer.train` the guard does nothing, so one that is left behind by a training that
    raised is inert, unless it is meant for there.
    """
    if model not in _guards:
        _guards[model] = []
        # FSDP2 and PEFT put one there, which `_generate` calls. A copy of a guarded model has ours,
        # and the one before.
        if "generate" in vars(model) and not _is_guarded(model):
            vars(model)["_generate_before_guards"] = vars(model)["generate"]
        # A bound method of a function of this module: copy.deepcopy and pickle copy it with the
        # model.
        vars(model)["generate"] = MethodType(_generate, model)
    entry = guard, outside_training
    _guards[model].append(entry)
    # A guard may know its callback, which keeps `remove`: with a reference to the model in it, a
    # training that raised would keep the model for ever.
    known = ref(model)

    def remove() -> None:
        model = known()
        if model is None:
            return
        guards = _guards.get(model, [])
        if entry in guards:
            guards.remove(entry)
            if not guards:
                del _guards[model]
                before = vars(model).pop("_generate_before_guards", None)
                # Unless somebody has put another one over ours since.
                if _is_guarded(model):
                    del vars(model)["generate"]
                    if before is not None:
                        vars(model)["generate"] = before

    return remove


def _is_guarded(model: nn.Module) -> bool:
    return getattr(vars(model).get("generate"), "__func__", None) is _generate


def base_model(model: Any) -> Any:
    """Return the model inside PEFT's, whose own `forward` and `generate` take anything; else it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def forbid_training_cache(model: nn.Module) -> Callable[[], None]:
    """Build no key-value cache in training forwards that are checkpointed; return what undoes that.

    A layer that is checkpointed keeps only its inputs, but a cache keeps its keys and values too.
    transformers 5 takes it from such layers itself; older versions, and models of one's own, may
    not. Without checkpointing a backward pass needs both anyway, so the cache costs nothing there.
    """
    base = base_model(model)
    if "use_cache" not in inspect.signature(base.forward).parameters:
        return lambda: None
    remove: Callable[[], None] = base.register_forward_pre_hook(
        _without_cache, with_kwargs=True
    ).remove
    return remove


def inside_training() -> bool:
    """Return whether a `Trainer.train` is running on this thread's stack.

    It takes about 2 microseconds. The Trainer has no event for a training that raised, but its
    frame is gone then.
    """
    # Below the callbacks, transformers is imported only when it is needed.
    from transformers import Trainer

    code = code_of(Trainer.train)
    return any(frame.f_code is code for frame in frames_above())


def _checkpointed(model: nn.Module) -> Iterator[Any]:
    return (m for m in model.modules() if getattr(m, "gradient_checkpointing", None) is True)


def _without_cache(
    module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]] | None:
    if torch.compiler.is_compiling() or not module.training or not inside_training():
        return None  # compiled code cannot look at the stack, and is not worth a graph break
    if next(_checkpointed(module), None) is None:
        return None
    return args, {**kwargs, "use_cache": False}


def _generate(self: Any, *args: object, **kwargs: object) -> object:
    generate = vars(self).get("_generate_before_guards") or MethodType(type(self).generate, self)
    is_in_training = inside_training()
    with ExitStack() as stack:
        for guard in [one for one, outside in _guards.get(self, ()) if outside or is_in_training]:
            stack.enter_context(guard(self, args, kwargs))
        return generate(*args, **kwargs)


# `copy` and `pickle` find a method by its function's name.
_generate.__name__ = "generate"
