"""Gives a training the arguments that `trainer-plugins exec --fit` has chosen."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from trainer_plugins.patched import Patches

VARIABLE = "TRAINER_PLUGINS_ARGUMENTS"  # holds what was planned, and what is to be another value


def change_arguments() -> None:
    """Let TrainingArguments be made with the chosen values, if they are those of the plan."""
    from transformers.training_args import TrainingArguments

    asked = json.loads(os.environ[VARIABLE])

    def post_init(made: Callable[[Any], None], args: Any) -> None:
        if all(getattr(args, name, None) == value for name, value in asked["planned"].items()):
            for name, value in asked["changed"].items():
                setattr(args, name, value)
        else:
            sys.stderr.write(
                "trainer-plugins exec --fit: these TrainingArguments are not those that were"
                " planned, and stay as they are\n"
            )
        made(args)

    Patches().wrap(TrainingArguments, "__post_init__", post_init)
