"""Prepares a model in training for `generate`, and drops its leftovers."""
# In train mode with gradient checkpointing `generate` silently returned wrong text before
# transformers 5.24: layers drop `past_key_values`, but get one token at a time (transformers
# #36051, `modeling_layers.py`). Dropout still makes it random there.

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
from torch.utils.hooks import RemovableHandle

from trainer_plugins.checkpointing import is_checkpointing
from trainer_plugins.upkeep.stack import is_running
from trainer_plugins.wrapped import base_model

# Surrounds a `generate`; receives the model, its arguments, and keywords to change.
GenerateGuard = Callable[
    [nn.Module, tuple[object, ...], dict[str, object]], AbstractContextManager[None]
]


# The guards of each model, and whether each also acts outside training.
_guards: WeakKeyDictionary[nn.Module, list[tuple[GenerateGuard, bool]]] = WeakKeyDictionary()


@contextmanager
def inference_mode_of(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode without gradient checkpointing, then restore every module."""
    modes = [(module, module.training) for module in model.modules()]
    modules: list[Any] = [*model.modules()]
    checkpointed = [m for m in modules if getattr(m, "gradient_checkpointing", None) is True]
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

    Inside the block, the model is in eval mode without gradient checkpointing. Afterwards every
    module is restored, even if the block raises, and leftovers of `generate` are dropped. Cached
    memory is not freed: all ranks have to agree on that, see `EvalGenerateCleanup`.

        with generation_memory(model):
            ids = model.generate(**prompt, max_new_tokens=64)
    """
    try:
        with inference_mode_of(model):
            yield
    finally:
        drop_leftovers(model)


def drop_leftovers(model: nn.Module) -> list[str]:
    """Drop the leftovers of `generate` on a model, and return their names."""
    # `_compiled_call` holds the compiled forward of a static cache with the pools of its CUDA
    # graphs; the manager of continuous batching holds a paged cache of most of the card. An
    # ordinary `generate` leaves nothing (transformers 5.23). Not yet measured on a GPU.
    names = ("_compiled_call", "_cached_continuous_batching_manager")
    found = [(module, name) for module in model.modules() for name in names if name in vars(module)]
    for module, name in found:
        stop = getattr(module, "destroy_cached_continuous_batching_manager", None)
        if name == "_cached_continuous_batching_manager" and stop is not None:
            stop()  # this also stops its thread
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
    """Wrap a guard around every `model.generate` inside training; return its removal."""
    # Outside `Trainer.train` only with `outside_training`, so a failed training leaves no effect.
    if not hasattr(model, "generate"):
        return lambda: None
    if model not in _guards:
        _guards[model] = []
        # FSDP2 and PEFT set `generate` on the instance. A guarded model's copy has ours and theirs.
        if "generate" in vars(model) and not _is_guarded(model):
            vars(model)["_generate_before_guards"] = vars(model)["generate"]
        # copy.deepcopy and pickle copy a bound method of a module's function with the model.
        vars(model)["generate"] = MethodType(_generate, model)
    entry = guard, outside_training
    _guards[model].append(entry)
    # A guard's callback keeps `remove`, which must not keep the model of a training that raised.
    model_ref = ref(model)

    def remove() -> None:
        model = model_ref()
        if model is None or entry not in _guards.get(model, ()):
            return
        _guards[model].remove(entry)
        if _guards[model]:
            return
        del _guards[model]
        before = vars(model).pop("_generate_before_guards", None)
        if _is_guarded(model):  # and no other code has replaced ours since
            del vars(model)["generate"]
            if before is not None:
                vars(model)["generate"] = before

    return remove


def _is_guarded(model: nn.Module) -> bool:
    return getattr(vars(model).get("generate"), "__func__", None) is _generate


def forbid_training_cache(model: nn.Module) -> Callable[[], None]:
    """Build no key-value cache in checkpointed training forwards; return the undo."""
    # transformers 5 withholds it from such layers; older versions and custom models may not.
    base = base_model(model)
    if "use_cache" not in inspect.signature(base.forward).parameters:
        return lambda: None
    handle: RemovableHandle = base.register_forward_pre_hook(_drop_cache, with_kwargs=True)
    return handle.remove


def inside_training() -> bool:
    """Return whether this thread runs a `Trainer.train`; one that raised has left the stack."""
    from transformers import Trainer  # imported only when needed

    return is_running(Trainer.train)


def _drop_cache(
    module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]] | None:
    if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
        return None  # compiled code cannot inspect the stack, and is not worth a graph break
    if not inside_training():
        return None
    return (args, {**kwargs, "use_cache": False}) if is_checkpointing(module) else None


def _generate(self: Any, *args: object, **kwargs: object) -> object:
    generate = vars(self).get("_generate_before_guards") or MethodType(type(self).generate, self)
    is_in_training = inside_training()
    with ExitStack() as stack:
        for guard, outside_training in list(_guards.get(self, ())):
            if outside_training or is_in_training:
                stack.enter_context(guard(self, args, kwargs))
        return generate(*args, **kwargs)


# `copy` and `pickle` find a method by its function's name.
_generate.__name__ = "generate"
