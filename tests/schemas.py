"""Makes `trainer_plugins/cli/schemas/*.json` of the values that `--json` prints.

`python -m tests.schemas` writes them; a test compares them with the values.
"""

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import jsonschema

from trainer_plugins.check import Checklist
from trainer_plugins.cli.as_json import VERSION
from trainer_plugins.explain.answer import Explanation
from trainer_plugins.launch.environment import LaunchEnvironment
from trainer_plugins.planner.calibrate import Calibration
from trainer_plugins.planner.compare.lines import Interrupted, SearchResult
from trainer_plugins.planner.compare.saved import ExplainedChanges
from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.report.summary import Summary
from trainer_plugins.report.top_page import TopPage

FOLDER = Path(__file__).parents[1] / "trainer_plugins" / "cli" / "schemas"
ANSWERS: dict[str, list[tuple[str, Any]]] = {
    "check": [("check", Checklist)],
    "env": [("env", LaunchEnvironment)],
    "explain": [("explain", Explanation)],
    "plan": [
        ("plan", MemoryPlan),
        ("plan --search", SearchResult),
        ("plan --search", Interrupted),
        ("plan --explain-change", ExplainedChanges),
    ],
    "report": [("report", Summary)],
    "top": [("top", TopPage)],
}  # by command: what it prints, by the `command` in it
_PLAIN = {bool: "boolean", int: "integer", float: "number", str: "string", NoneType: "null"}


def schema(name: str) -> dict[str, Any]:
    """Describe what a command prints."""
    definitions: dict[str, Any] = {}
    answers = []
    for command, kind in ANSWERS[name]:
        found = _object(kind, definitions)
        del found["description"]  # of our code
        more = {"version": {"const": VERSION}, "command": {"const": command}}
        found["required"] = [*more, *found["required"]]
        if kind is MemoryPlan:
            more["calibration"] = _of(Calibration, definitions)  # with --calibrate
        answers.append({**found, "properties": {**more, **found["properties"]}})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"trainer-plugins {name} --json, version {VERSION}",
        **(answers[0] if len(answers) == 1 else {"anyOf": answers}),
        "$defs": dict(sorted(definitions.items())),
    }


def _object(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    words = dict(re.findall(r"^    (\w+): .*?  # (.+)$", inspect.getsource(kind), re.MULTILINE))
    found = {each.name: _of(each.type, definitions) for each in fields(kind)}
    for name, one in found.items():
        if name in words:
            one["description"] = words[name]
    for name in getattr(kind, "json_properties", ()):
        found[name] = _of(get_type_hints(getattr(kind, name).fget)["return"], definitions)
    return {
        "type": "object",
        "description": (kind.__doc__ or "").split("\n")[0],
        "properties": found,
        "required": [*found],
    }


def read_answer(text: str, name: str) -> dict[str, Any]:
    """Read what a command printed; it has to be as its schema says."""
    found: dict[str, Any] = json.loads(text)
    jsonschema.validate(found, json.loads((FOLDER / f"{name}.json").read_text()))
    return found


def _of(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return {"enum": [*parts]}
    if origin in (UnionType, Union):
        found = [_of(part, definitions) for part in parts]
        is_plain = all(each.keys() == {"type"} for each in found)
        return {"type": [each["type"] for each in found]} if is_plain else {"anyOf": found}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _of(parts[1], definitions)}
    if origin is Sequence or parts[1:] == (...,):
        return {"type": "array", "items": _of(parts[0], definitions)}
    if origin is tuple:
        items = [_of(part, definitions) for part in parts]
        return {"type": "array", "prefixItems": items, "minItems": len(items)}
    if isinstance(kind, type) and is_dataclass(kind):
        name = kind.__name__
        if name not in definitions:
            definitions[name] = {}
            definitions[name] = _object(kind, definitions)
        return {"$ref": f"#/$defs/{name}"}
    if issubclass(kind, Enum):
        return {"enum": [each.name for each in kind]}
    return {"type": "string" if issubclass(kind, Path) else _PLAIN[kind]}


def as_text(name: str) -> str:
    """Write a schema; what has no mapping in it stands on one line."""
    found = schema(name)
    text = json.dumps(found, indent=1)
    for pattern in (r"\[[^\[\]{}]*\]", r"\{[^{}]*\}"):
        text = re.sub(pattern, lambda part: " ".join(part[0].split()), text)
    assert json.loads(text) == found
    return text + "\n"


def strict(value: Any) -> Any:
    """Return a schema that refuses keys it does not know, and lets any be missing."""
    if isinstance(value, list):
        return [strict(each) for each in value]
    if not isinstance(value, dict):
        return value
    found = {key: strict(each) for key, each in value.items() if key != "required"}
    return found | {"additionalProperties": False} if "properties" in value else found


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in ANSWERS:
        (FOLDER / f"{each}.json").write_text(as_text(each))
