"""KVCacheGuard: correct text from `generate` inside training."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn
from transformers import GenerationMixin, TrainerControl, TrainerState, TrainingArguments

from trainer_plugins.callbacks._run import RunCallback, model_of
from trainer_plugins.upkeep.generation import (
    base_model,
    guard_generate,
    inference_mode_of,
)


class KVCacheGuard(RunCallback):
    """Makes `generate` inside training correct, with its key-value cache.

    On a model in train mode with gradient checkpointing, `generate` silently returns wrong text.
    Inside training it therefore runs in eval mode, without checkpointing, with `use_cache=True`
    unless its caller says otherwise. Each module is restored exactly as it was found, even if it
    raises. `model.config` is not touched. What a training that raised leaves on the model is inert.

    Training forwards keep the cache that they build, if any: a backward pass needs the same keys
    and values, so the peak is the same, and models such as T5 round otherwise without it.
    """

    def __init__(self) -> None:
        super().__init__()

    def at_rest(self) -> None:
        super().at_rest()
        self._undo: list[Callable[[], None]] = []

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self.begin_run()
        if self.is_second(state):
            return
        with self.harmless():
            model = model_of(kwargs)
            if hasattr(model, "generate"):
                self._undo.append(guard_generate(model, _as_in_inference))

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self.end_run()

    def end_run(self) -> None:
        super().end_run()
        while self._undo:
            self._undo.pop()()


@contextmanager
def _as_in_inference(
    model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> Iterator[None]:
    # A generation config, by name or as second argument, is the caller's decision on the cache; a
    # model with a `generate` of its own may not have a cache.
    if (
        len(args) < 2
        and kwargs.get("generation_config") is None
        and isinstance(base_model(model), GenerationMixin)
    ):
        kwargs.setdefault("use_cache", True)
    with inference_mode_of(model):
        yield
