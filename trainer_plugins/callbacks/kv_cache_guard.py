"""KVCacheGuard: no key-value cache in training forwards, and right text from `generate` inside training."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import GenerationMixin, TrainerControl, TrainerState, TrainingArguments

from trainer_plugins.callbacks._run import RunCallback
from trainer_plugins.upkeep.generation import (
    base_model,
    forbid_training_cache,
    guard_generate,
    inference_mode_of,
)


class KVCacheGuard(RunCallback):
    """For the length of training: training forwards build no cache, and `generate` runs as it does in inference.

    `generate` on a model in train mode with gradient checkpointing returns wrong text without a
    word. Inside training it therefore runs in eval mode, without checkpointing, with
    `use_cache=True` unless its caller says otherwise; each module is put back exactly as it was
    found, also when it raises. `model.config` is not touched. After a training that raised, what is
    left on the model is inert.

    Cost: about 2 microseconds a forward; a `generate` inside training is as fast as it is outside.
    """

    def __init__(self) -> None:
        super().__init__()

    def at_rest(self) -> None:
        super().at_rest()
        self._undo: list[Callable[[], None]] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.begin_run()
        if self.is_second(state):
            return
        model: nn.Module = kwargs["model"]
        with self.harmless():
            self._undo.append(forbid_training_cache(model))
            if hasattr(model, "generate"):
                self._undo.append(guard_generate(model, _as_in_inference))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.end_run()

    def end_run(self) -> None:
        super().end_run()
        while self._undo:
            self._undo.pop()()


@contextmanager
def _as_in_inference(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[None]:
    # A generation config, by name or second in place, is the caller's word on the cache; a model
    # with a `generate` of its own may know no cache.
    if (
        len(args) < 2
        and kwargs.get("generation_config") is None
        and isinstance(base_model(model), GenerationMixin)
    ):
        kwargs.setdefault("use_cache", True)
    with inference_mode_of(model):
        yield
