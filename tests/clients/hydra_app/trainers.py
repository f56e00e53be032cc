"""The registry: four shapes in which apps build their Trainer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.models import tiny_llama, token_rows


class CudaCacheCallback(TrainerCallback):
    """The app's own, by the name of one of ours."""


class EvaluatesItself(Trainer):
    """Has evaluators of its own, so that nobody hears on_evaluate."""

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = {"own_score": 1.0, "loss": 2.0}
        self.log(metrics)
        return metrics


def forwards(config: DictConfig, **kwargs: Any) -> Trainer:
    return Trainer(**kwargs, **config.trainer.method_args)


def own_callbacks(config: DictConfig, **kwargs: Any) -> Trainer:
    return Trainer(callbacks=[CudaCacheCallback()], **kwargs, **config.trainer.method_args)


def evaluates_itself(config: DictConfig, **kwargs: Any) -> Trainer:
    return EvaluatesItself(**kwargs, **config.trainer.method_args)


def instantiates(config: DictConfig, **kwargs: Any) -> Trainer:
    return Trainer(callbacks=[instantiate(one) for one in config.callbacks.values()], **kwargs)


HANDLERS = {
    make.__name__: make for make in (forwards, own_callbacks, evaluates_itself, instantiates)
}


def train(make: Callable[..., Trainer], config: DictConfig, folder: Path) -> None:
    settings: dict[str, Any] = OmegaConf.to_container(config.trainer.args)  # type: ignore[assignment]
    trainer = make(
        config,
        model=tiny_llama(),
        args=TrainingArguments(str(folder), **settings),
        train_dataset=token_rows(),
        eval_dataset=token_rows(4),
    )
    trainer.train()
    facts = {
        "step": trainer.state.global_step,
        "callbacks": {
            f"{type(one).__module__}.{type(one).__qualname__}": {
                name: value
                for name, value in vars(one).items()
                if isinstance(value, (int, float, str))
            }
            for one in trainer.callback_handler.callbacks
        },
        "num_callbacks": len(trainer.callback_handler.callbacks),
    }
    (folder / "facts.json").write_text(json.dumps(facts))
