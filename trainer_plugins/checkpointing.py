"""Map transformers' names for checkpointing: 5.23 renamed it, and 6 will drop the old names."""

import re
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Version 5.23's Trainer reads the first names; the others are copies made at the start.
_NAMES = ("activation_checkpointing", "gradient_checkpointing")
_OPTIONS = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
_ANY = re.compile(r"(?<!\w)(?:activation|gradient)[-_]checkpointing([-_]kwargs)?")
NAME, OPTIONS = _NAMES[1], _OPTIONS[1]  # as in the installed transformers
CAN_OFFLOAD = False  # whether it supports `offload`, which moves checkpoints to main memory
with suppress(OSError, ValueError):
    # Read from the file: importing importlib.metadata takes longer than `trainer-plugins explain`.
    _spec = find_spec("transformers")
    _text = Path(_spec.origin).read_text("utf-8") if _spec and _spec.origin else ""
    _numbers = re.search(r'^__version__ = "(\d+)\.(\d+)', _text, re.MULTILINE)
    if _numbers and (int(_numbers[1]), int(_numbers[2])) >= (5, 23):
        NAME, OPTIONS, CAN_OFFLOAD = _NAMES[0], _OPTIONS[0], True


def spell(text: str, *, for_any: bool = False) -> str:
    """Spell flags, arguments and methods as in the installed transformers.

    With `for_any` as in every transformers before 6, for a run whose version is not known.

    >>> spell("--activation_checkpointing_kwargs {}") == f"--{OPTIONS} {{}}"
    True
    >>> spell("use_gradient_checkpointing fsdp_activation_checkpointing")  # of PEFT, accelerate
    'use_gradient_checkpointing fsdp_activation_checkpointing'
    >>> spell("--activation_checkpointing True", for_any=True)
    '--gradient_checkpointing True'
    """
    name, with_options = (_NAMES[1], _OPTIONS[1]) if for_any else (NAME, OPTIONS)
    return _ANY.sub(lambda found: with_options if found[1] else name, text)


def is_asked(arguments: object) -> bool:
    """Return whether TrainingArguments, or a mapping of them, switch checkpointing on."""
    return bool(_first(arguments, _NAMES))


def options(arguments: object) -> dict[str, Any]:
    """Return the checkpointing options in TrainingArguments, or in a mapping of them."""
    found = _first(arguments, _OPTIONS)
    return found if isinstance(found, dict) else {}


def _first(arguments: object, names: tuple[str, ...]) -> object:
    values = arguments if isinstance(arguments, Mapping) else vars(arguments)
    return next((value for name in names if (value := values.get(name)) is not None), None)


def is_checkpointing(model: Any) -> bool:
    """Return whether a part of the model recomputes activations in the backward pass."""
    if not hasattr(model, "modules"):  # such as SetFit's
        return False
    return any(getattr(part, "gradient_checkpointing", False) is True for part in model.modules())


def switch_on(model: Any, how: Mapping[str, object]) -> None:
    """Switch on checkpointing in a transformers model, with TrainingArguments' options."""
    rest = dict(how)
    placed = {name: rest.pop(name) for name in ("every_n_layers", "offload") if name in rest}
    getattr(model, f"{NAME}_enable")(rest or None, **placed)


def switch_off(model: Any) -> None:
    """Switch off checkpointing in a transformers model."""
    getattr(model, f"{NAME}_disable")()
