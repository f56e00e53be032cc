"""Makes dataclasses from untrusted JSON: each value is checked against its field's type."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin

T = TypeVar("T")


def from_json(kind: Callable[..., T], record: object) -> T:
    """Construct a dataclass from a record, without fields that it lacks: a later version's.

    It raises TypeError or ValueError for a wrong value; numbers must fit in 64 bits.
    """
    if not isinstance(record, Mapping):
        raise TypeError(f"{kind} is made of a JSON object, got {type(record).__name__}")
    values = {
        name: _value(record[name], field_type)
        for name, field_type in _types_of(kind)
        if name in record
    }
    return kind(**values)


@cache
def _types_of(kind: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((field.name, field.type) for field in fields(kind))


def _value(value: object, kind: Any) -> object:
    """Return a JSON value as its field has it: a list as a tuple, an object as a dataclass."""
    # Python 3.10 takes `tuple[int, ...]` for a type.
    if get_origin(kind) is not None or not isinstance(kind, type):
        return _composed(value, kind)
    if is_dataclass(kind):
        return value if isinstance(value, kind) else from_json(kind, value)
    if issubclass(kind, Enum):
        return kind(value)
    if kind is int or kind is float:
        # A bool is an int in Python, but not in JSON.
        allowed = (int,) if kind is int else (int, float)
        is_valid = type(value) in allowed and abs(value) < 1 << 63  # type: ignore[arg-type]
    else:
        is_valid = isinstance(value, kind)
    if not is_valid:
        raise TypeError(f"{str(value)[:40]} is not a {kind.__name__}")
    return value


def _composed(value: object, kind: Any) -> object:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal and isinstance(value, str) and value in parts:
        return value
    if origin is Mapping and isinstance(value, Mapping):
        return {_value(k, parts[0]): _value(v, parts[1]) for k, v in value.items()}
    if origin is tuple and isinstance(value, list):
        if parts[1:] == (...,):
            return tuple(_value(one, parts[0]) for one in value)
        if len(parts) == len(value):
            return tuple(_value(one, part) for one, part in zip(value, parts, strict=True))
    if origin is UnionType and len(parts) == 2 and type(None) in parts:
        (other,) = set(parts) - {type(None)}
        return None if value is None else _value(value, other)
    raise TypeError(f"{str(value)[:40]} is not a {kind}")
