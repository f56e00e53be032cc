"""Print the result of a command as JSON, for other programs; docs/json.md describes it.

To add a value, write a field with a comment on its meaning, and run `python -m tests.schemas`;
`docs/json.md` explains it. A removed or changed value needs a new `VERSION`.
"""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum

# A version only ever gains keys; `schemas/` has one JSON Schema for each command.
VERSION = 1


def print_json(command: str, found: object, **more: object) -> None:
    """Print an answer as one object, with the format's version and the command."""
    answer = {"version": VERSION, "command": command, **_plain(found), **_plain(more)}
    print(json.dumps(answer, indent=2))


def plain(value: object) -> object:
    """Convert a value to JSON types: an enum to its name, a dataclass to an object.

    An object has the fields, and those properties that the class lists in `json_properties`.
    """
    if is_dataclass(value) or isinstance(value, Mapping):
        return _plain(value)
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return str(value)


def _plain(value: object) -> dict[str, object]:
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    names = [each.name for each in fields(value)]  # type: ignore[arg-type]
    names += getattr(value, "json_properties", ())
    return {name: plain(getattr(value, name)) for name in names}
