"""checkpointing: what transformers calls it. 5.23 renamed it, and 6 will drop the old names."""

import re
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_NAMES = ("activation_checkpointing", "gradient_checkpointing")  # a run with 5.23 has both
_ANY = re.compile(r"(?<!\w)(?:activation|gradient)[-_]checkpointing([-_]kwargs)?")
NAME = _NAMES[1]  # as the installed transformers wants it
with suppress(PackageNotFoundError):
    if [int(number) for number in re.findall(r"\d+", version("transformers"))[:2]] >= [5, 23]:
        NAME = _NAMES[0]


def spelled(text: str) -> str:
    """Write flags, arguments and methods as the installed transformers names them.

    >>> spelled("--activation_checkpointing_kwargs {}") == f"--{NAME}_kwargs {{}}"
    True
    >>> spelled("use_gradient_checkpointing fsdp_activation_checkpointing")  # of PEFT, accelerate
    'use_gradient_checkpointing fsdp_activation_checkpointing'
    """
    return _ANY.sub(lambda found: f"{NAME}_kwargs" if found[1] else NAME, text)


def is_asked(arguments: object) -> bool:
    """Return whether TrainingArguments, or a mapping of them, switch checkpointing on."""
    return bool(_value(arguments, ""))


def options(arguments: object) -> dict[str, Any]:
    """Return the options of checkpointing in TrainingArguments, or in a mapping of them."""
    found = _value(arguments, "_kwargs")
    return found if isinstance(found, dict) else {}


def is_checkpointing(model: Any) -> bool:
    """Return whether a part of the model computes activations again in the backward pass."""
    return any(getattr(part, "gradient_checkpointing", False) is True for part in model.modules())


def switch_on(model: Any, how: Mapping[str, object]) -> None:
    """Let a model of transformers checkpoint, with the options of TrainingArguments."""
    rest = dict(how)
    placed = {name: rest.pop(name) for name in ("every_n_layers", "offload") if name in rest}
    name = _name_of(model, "enable")
    getattr(model, f"{name}_enable")(**{f"{name}_kwargs": rest or None}, **placed)


def switch_off(model: Any) -> None:
    """Let a model of transformers keep its activations again."""
    getattr(model, f"{_name_of(model, 'disable')}_disable")()


def _name_of(model: Any, method: str) -> str:
    """Return the name in use: before transformers 5 a model has no method of the new name."""
    return next(name for name in _NAMES if hasattr(model, f"{name}_{method}"))


def _value(arguments: object, part: str) -> object:
    """Read the new name first: the Trainer does, and the old one is a copy made at the start."""
    values = arguments if isinstance(arguments, Mapping) else vars(arguments)
    found = (values.get(f"{name}{part}") for name in _NAMES)
    return next((value for value in found if value is not None), None)
