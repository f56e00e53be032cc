"""Applies the arguments that `trainer-plugins exec --fit` chose to a training."""

import functools
import json
import os
import sys
from collections.abc import Callable
from inspect import signature
from typing import Any

from trainer_plugins.checkpointing import is_asked
from trainer_plugins.patched import Patches

VARIABLE = "TRAINER_PLUGINS_ARGUMENTS"  # holds the planned values, and the changed ones


def change_arguments() -> None:
    """Make TrainingArguments use the chosen values, if they match those that were planned."""
    from transformers.training_args import TrainingArguments

    asked = json.loads(os.environ[VARIABLE])

    def post_init(made: Callable[[Any], None], args: Any) -> None:
        if all(getattr(args, name, None) == value for name, value in asked["planned"].items()):
            for name, value in asked["changed"].items():
                setattr(args, name, value)
        else:
            sys.stderr.write(
                "trainer-plugins exec --fit: these TrainingArguments differ from the planned"
                " ones, so they stay as they are\n"
            )
        made(args)

    Patches().wrap(TrainingArguments, "__post_init__", post_init)


def give_adapters() -> None:
    """Make a Trainer whose arguments were given a `peft_config` train that adapter.

    A Trainer that takes `peft_config`, as TRL's do, receives it: DPO then needs no second model.
    Others receive their model with the adapter in it. A model that already has one stays as it is.
    """
    from transformers.trainer import Trainer

    def init_subclass(cls: Any, /, **kwargs: Any) -> None:
        super(Trainer, cls).__init_subclass__(**kwargs)
        if "__init__" in vars(cls) and "peft_config" in signature(cls.__init__).parameters:
            cls.__init__ = _adapt_init(cls.__init__)

    Trainer.__init__ = _adapt_init(Trainer.__init__)
    Trainer.__init_subclass__ = classmethod(init_subclass)


def _adapt_init(init: Callable[..., None]) -> Callable[..., None]:
    names = list(signature(init).parameters)

    @functools.wraps(init)
    def init_adapted(*args: Any, **kwargs: Any) -> None:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        asked = getattr(given.get("args"), "peft_config", None)
        if not asked or hasattr(given.get("model"), "peft_config"):
            return init(*args, **kwargs)
        if "peft_config" in names:
            given["peft_config"] = given.get("peft_config") or _config(asked, given)
        elif given.get("model_init"):
            begin = given["model_init"]
            # wrapped: the Trainer counts its parameters
            given["model_init"] = functools.wraps(begin)(
                lambda *trial: _adapt(begin(*trial), asked, given)
            )
        else:
            given["model"] = _adapt(given["model"], asked, given)
        return init(**given)

    return init_adapted


def _config(asked: dict[str, Any], given: dict[str, Any]) -> Any:
    """Build the config of the adapter; its task determines which head is trained in full."""
    import peft

    kind = type(given["model"]).__name__ + type(given["self"]).__name__
    tasks = {
        "ForCausalLM": "CAUSAL_LM",
        "ForConditionalGeneration": "SEQ_2_SEQ_LM",
        "ForSequenceClassification": "SEQ_CLS",
        "ForTokenClassification": "TOKEN_CLS",
        "ForQuestionAnswering": "QUESTION_ANS",
        "RewardTrainer": "SEQ_CLS",
    }
    task = next((task for name, task in tasks.items() if name in kind), None)
    return peft.get_peft_config({**asked, "task_type": task})


def _adapt(model: Any, asked: dict[str, Any], given: dict[str, Any]) -> Any:
    import peft

    if is_asked(given["args"]):
        model.enable_input_require_grads()  # nothing before the first block needs gradients now
    return peft.get_peft_model(model, _config(asked, {**given, "model": model}))
