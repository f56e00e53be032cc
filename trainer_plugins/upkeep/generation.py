"""Generation: what `generate` needs from a model that is being trained, and what it leaves behind.

`generate` on a model in train mode with gradient checkpointing returns wrong text without a word:
the checkpointed layers drop `past_key_values`, while `generate` goes on feeding them one token at a
time (transformers issue #36051, `modeling_layers.py`).
"""

import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

GenerateGuard = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], AbstractContextManager[None]]
"""Put around each `generate` inside training: takes the model and the arguments; those by name it may change."""

_guards: WeakKeyDictionary[nn.Module, list[GenerateGuard]] = WeakKeyDictionary()


@contextmanager
def inference_mode_of(model: nn.Module) -> Iterator[None]:
    """The model in eval mode without gradient checkpointing; afterwards each module exactly as it was found."""
    modes = [(module, module.training) for module in model.modules()]
    checkpointed: list[Any] = [
        m for m in model.modules() if getattr(m, "gradient_checkpointing", None) is True
    ]
    was_training = model.training
    try:
        # By the model's own methods first, which some adapters override to merge and unmerge their
        # weights.
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
    """Wrap one's own preview code: the model generates as in inference, and what that left is dropped.

    The model generates in eval mode without gradient checkpointing and is left exactly as it was
    found, also when the block raises; then what `generate` left behind is dropped, if anything.
    Cached memory is not released: that is for all ranks to agree on, see `EvalGenerateCleanup`.
    """
    try:
        with inference_mode_of(model):
            yield
    finally:
        drop_leftovers(model)


def leftovers(model: nn.Module) -> list[tuple[Any, str]]:
    """What `generate` has left on a model, as pairs of a module and the name of its attribute.

    `_compiled_call` holds the compiled forward of a static cache, with the memory pools of its CUDA
    graphs; `_cached_continuous_batching_manager` holds a paged cache of most of the card. An
    ordinary `generate` leaves nothing (transformers 5.23).
    """
    names = ("_compiled_call", "_cached_continuous_batching_manager")
    return [(module, name) for module in model.modules() for name in names if name in vars(module)]


def drop_leftovers(model: nn.Module) -> list[str]:
    """Drop what `generate` has left on a model, and say what that was.

    With a compiled call go the memory pools of CUDA graphs; graphs of other compiled code are
    recorded again when it runs next. What is compiled stays compiled. Not yet measured on a GPU.
    """
    found = leftovers(model)
    for module, name in found:
        if name == "_cached_continuous_batching_manager" and hasattr(
            module, "destroy_cached_continuous_batching_manager"
        ):
            module.destroy_cached_continuous_batching_manager()  # stops its thread, too
        vars(module).pop(name, None)
    # Imported by torch only where graphs are in use.
    graphs = sys.modules.get("torch._inductor.cudagraph_trees")
    if graphs is not None and any(name == "_compiled_call" for _, name in found):
        graphs.reset_cudagraph_trees()
    if found:
        gc.collect()
    return [f"{type(module).__name__}.{name}" for module, name in found]


def guard_generate(model: nn.Module, guard: GenerateGuard) -> Callable[[], None]:
    """Put a guard around every `model.generate` that happens inside training; returns what takes it away again.

    Outside `Trainer.train` the guard does nothing, so that a guard left behind by a training that
    raised is inert.
    """
    if model not in _guards:
        _guards[model] = []
        # FSDP2 and PEFT put one there; `_generate` calls it. A copy of a guarded model has ours,
        # and what was before.
        if "generate" in vars(model) and not _is_guarded(model):
            vars(model)["_generate_before_guards"] = vars(model)["generate"]
        # A bound method of a function of this module: it is copied with the model by copy.deepcopy,
        # and pickles.
        vars(model)["generate"] = MethodType(_generate, model)
    _guards[model].append(guard)

    def remove() -> None:
        guards = _guards.get(model, [])
        if guard in guards:
            guards.remove(guard)
            if not guards:
                del _guards[model]
                before = vars(model).pop("_generate_before_guards", None)
                # Unless somebody has put something of his own over ours since.
                if _is_guarded(model):
                    del vars(model)["generate"]
                    if before is not None:
                        vars(model)["generate"] = before

    return remove


def _is_guarded(model: nn.Module) -> bool:
    return getattr(vars(model).get("generate"), "__func__", None) is _generate


def base_model(model: Any) -> Any:
    """The model inside PEFT's, whose own `forward` and `generate` take anything; else the model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def forbid_training_cache(model: nn.Module) -> Callable[[], None]:
    """Build no key-value cache in training forwards of this model; returns what takes that away again.

    Trainer sets `config.use_cache=False` since transformers 5; older versions, and models that ask
    elsewhere, build the keys and values of every layer for nothing.
    """
    base = base_model(model)
    if "use_cache" not in inspect.signature(base.forward).parameters:
        return lambda: None
    remove: Callable[[], None] = base.register_forward_pre_hook(
        _without_cache, with_kwargs=True
    ).remove
    return remove


def inside_training() -> bool:
    """Whether a `Trainer.train` is running above us on this thread's stack.

    Costs about 2 microseconds.

    The Trainer has no event for a training that raised; its frame, though, is gone then.
    """
    from transformers import (
        Trainer,
    )  # the floors below the callbacks do not import transformers before it is needed

    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is Trainer.train.__code__:
            return True
    return False


def _without_cache(
    module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    if torch.compiler.is_compiling() or not module.training or not inside_training():
        return None  # a compiled forward cannot look at the stack, and is not worth a graph break
    return args, {**kwargs, "use_cache": False}


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    generate = vars(self).get("_generate_before_guards") or MethodType(type(self).generate, self)
    if not inside_training():
        return generate(*args, **kwargs)
    with ExitStack() as stack:
        for guard in _guards.get(self, ()):
            stack.enter_context(guard(self, args, kwargs))
        return generate(*args, **kwargs)


# `copy` and `pickle` find a method by the name of its function.
_generate.__name__ = "generate"
