"""Find the value that cannot be right in a user's settings, by comparing it with sound ones."""

import dataclasses
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from types import UnionType
from typing import Any, NamedTuple, TypeGuard, Union, get_args, get_origin, get_type_hints

from trainer_plugins.launch.lint.training import nearest
from trainer_plugins.planner.plan import PlanError

_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "true or false"),
    (int, "a whole number"),
    (float, "a number"),
    (str, "a string"),
    ((list, tuple), "a list"),
    (Mapping, "a mapping"),
    (type(None), "null"),
)  # the first that applies, since `bool` is an `int` in Python

_OF_A_FIELD = re.compile(r"error for field '(\w+)'")
# huggingface_hub/errors.py, dataclasses.py
_EXPECTED = re.compile(r"expected (bool|int|float|str|list|tuple|dict|NoneType)\b")

_ALSO = {
    "true or false": "a whole number",
    "a number": "a whole number",
    "a string": "true or false",  # TrainingArguments makes `fsdp` true, which was a string
}  # what is accepted instead of what a hint asks for

_OF_PYTHON: dict[str, object] = {
    "bool": True,
    "int": 1,
    "float": 1.0,
    "str": "",
    "list": [],
    "tuple": [],
    "dict": {},
    "NoneType": None,
}


class _Pair(NamedTuple):
    key: str  # with the keys around it, as in `text_config.hidden_size`
    value: object
    sound: object


def wrong_value(
    given: Mapping[str, object],
    sound: Mapping[str, object],
    error: BaseException,
    checked: Collection[str] = (),
) -> str | None:
    """Say which value has led to an error, and what is expected; None if none is found.

    Values of `checked` keys are of the right kind, unless the error names them.
    """
    said, pairs = str(error), [*_pairs(given, sound)]
    for field in _OF_A_FIELD.findall(said)[:1]:
        kinds = dict.fromkeys(_kind(_OF_PYTHON[name]) for name in _EXPECTED.findall(said))
        if field in given and kinds and _kind(given[field]) not in kinds:
            return f"{field} is {_json(given[field])}: {' or '.join(kinds)} is expected"
    for key, value, default in pairs:
        expected, found = _kind(default), _kind(value)
        is_right = key in checked or found in (expected, _ALSO.get(expected))
        if not is_right and (value is not None or "NoneType" in said):
            return f"{key} is {_json(value)}: {expected} is expected, as in {_json(default)}"
    for key, value, default in pairs:
        if "token" in key or not _is_number(value) or not _is_number(default):
            continue  # the id of a token may be 0
        if value < 1 <= default:
            expected = f"a number of at least 1 is expected, as in {_json(default)}"
            return f"{key} is {_json(value)}: {expected}"
    for key, value, default in pairs:
        is_name = isinstance(error, (KeyError, AttributeError)) and isinstance(value, str)
        if is_name and repr(value) in said:
            unknown = f"{key} is {_json(value)}, and nothing has that name"
            return f"{unknown}; an example is {_json(default)}"
    return None


def check_kinds(kind: Any, fields: Mapping[str, object]) -> None:
    """Check the fields of a dataclass by its hints, before it takes "2" for a number."""
    hints = get_type_hints(kind)
    defaults = {each.name: each.default for each in dataclasses.fields(kind)}
    for name, value in fields.items():
        if name in defaults and type(value) is type(defaults[name]):
            continue  # hints are not always right, as in `x: int = None`
        if name not in hints:
            near = nearest(name, hints)
            raise PlanError(f"{kind.__name__} has no {name}{f': is it {near}?' if near else ''}")
        expected = _expected(value, hints[name])
        if expected is not None:
            raise PlanError(f"{name} is {_json(value)}: {expected} is expected")


def _expected(value: object, hint: object) -> str | None:
    """Return what a hint asks for instead of a value, which may be the path of a mapping."""
    is_union = get_origin(hint) in (Union, UnionType)
    hints = {get_origin(each) or each for each in (get_args(hint) if is_union else (hint,))}
    wanted = hints - {type(None)} if hints <= {str, type(None)} else hints - {type(None), str}
    if len(wanted) != 1 or (value is None and type(None) in hints):
        return None
    expected, found = _kind(_OF_PYTHON.get(getattr(wanted.pop(), "__name__", ""))), _kind(value)
    if isinstance(value, str) and str in hints:
        is_read = value.lstrip().startswith("{") or os.path.exists(value)
        return None if is_read or expected != "a mapping" else expected
    also = _ALSO.get(expected, "")
    if isinstance(value, float) and value.is_integer():
        also = "a number"
    return None if found in ("", expected, also) or expected == "null" else expected


def with_its_key(given: Mapping[str, object], line: str) -> str:
    """Add the key of the value that an error quotes to its line, if it quotes one."""
    for name, value in given.items():
        is_quoted = isinstance(value, str) and repr(value) in line
        if is_quoted or line.startswith(f"{value} is not"):
            return f"{name} is {_json(value)}: {line}"
    return line


def _pairs(
    given: Mapping[str, object], sound: Mapping[str, object], before: str = ""
) -> Iterator[_Pair]:
    for key, value in given.items():
        default = sound.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            yield from _pairs(value, default, f"{before}{key}.")
        elif isinstance(value, (list, tuple)) and isinstance(default, (list, tuple)) and default:
            yield from (
                _Pair(f"{before}{key}[{i}]", each, default[0]) for i, each in enumerate(value)
            )
        elif default is not None:
            yield _Pair(f"{before}{key}", value, default)


def _kind(value: object) -> str:
    if isinstance(value, Mapping) and value.keys() == {"__float__"}:  # as transformers 5 has inf
        return _kind(0.0)
    return next((words for kinds, words in _KINDS if isinstance(value, kinds)), "")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _json(value: object) -> str:
    return json.dumps(value, default=str)
