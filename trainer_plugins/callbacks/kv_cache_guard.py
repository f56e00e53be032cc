"""KVCacheGuard: correct text from `generate` in training, and no cache under checkpointing."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import GenerationMixin

from trainer_plugins.callbacks._run import Event, RunCallback, model_of
from trainer_plugins.hf_trainer import HfArguments, HfState
from trainer_plugins.upkeep.generation import (
    forbid_training_cache,
    guard_generate,
    inference_mode_of,
)
from trainer_plugins.wrapped import base_model


class KVCacheGuard(RunCallback):
    """Makes `generate` inside training return correct text, and use its key-value cache.

    On a model in train mode, `generate` silently returns wrong text: of dropout, and, before
    transformers 5.24, of gradient checkpointing. Inside training the guard runs it in eval mode,
    without checkpointing, and with `use_cache=True` unless you pass something else. Afterwards each
    module is restored exactly, even if `generate` raises. `model.config` stays untouched. If
    training raises, anything left on the model has no effect.

    With gradient checkpointing, training forwards get `use_cache=False`: a cache would keep the
    keys and values of each layer, which checkpointing recomputes. transformers 5 builds none then,
    so nothing changes there; older versions and custom models may. Without checkpointing the
    backward pass needs them anyway, and models such as T5 round differently without a cache, so
    training forwards keep theirs.
    """

    def __init__(self) -> None:
        super().__init__()

    def run_begins(self, args: HfArguments, state: HfState, event: Event) -> None:
        with self.harmless():
            model = model_of(event)
            self.undo.callback(forbid_training_cache(model))
            self.undo.callback(guard_generate(model, _switch_to_inference))


@contextmanager
def _switch_to_inference(
    model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> Iterator[None]:
    # A generation config, by name or as second argument, is the caller's decision about the cache.
    # A model with its own `generate` may not have a cache.
    may_have_one = isinstance(base_model(model), GenerationMixin)
    if may_have_one and len(args) < 2 and kwargs.get("generation_config") is None:
        kwargs.setdefault("use_cache", True)
    with inference_mode_of(model):
        yield
