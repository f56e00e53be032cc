"""Print the result of a command as JSON, for other programs; docs/json.md describes it.

To add a value, write a field with a comment on its meaning, and run `python -m tests.schemas`;
`docs/json.md` explains it. A removed or changed value needs a new `VERSION`.
"""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

# A version only ever gains keys; `schemas/` has one JSON Schema for each command.
VERSION = 1


def print_json(command: str, found: object, **more: object) -> None:
    """Print an answer as one object, with the format's version and the command."""
    answer = {"version": VERSION, "command": command, **plain(found), **plain(more)}
    print(json.dumps(answer, indent=2))


def plain(value: object) -> Any:
    """Convert a value to JSON types: an enum to its name, a dataclass to an object.

    An object has the fields, and those properties that the class lists in `json_properties`.
    """
    if is_dataclass(value):
        names = [each.name for each in fields(value)]
        names += getattr(value, "json_properties", ())
        value = {name: getattr(value, name) for name in names}
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return str(value)
