"""Makes dataclasses of JSON that anybody may have written: each value has its field's type."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin

T = TypeVar("T")


def made(kind: Callable[..., T], record: object) -> T:
    """Construct a dataclass from its fields in a record; fields that the record lacks default.

    Numbers must fit in 64 bits. Fields that the class lacks are of a later version, and are left
    out.

    Raises:
        TypeError: a field without a default is missing, or a value does not have the field's type.
        ValueError: the class refuses its values.
    """
    if not isinstance(record, Mapping):
        raise TypeError(f"{kind} is made of a JSON object, got {type(record).__name__}")
    return kind(
        **{name: _value(record[name], its) for name, its in _types_of(kind) if name in record}
    )


@cache
def _types_of(kind: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((f.name, f.type) for f in fields(kind))


def _value(value: object, kind: Any) -> object:
    """Return a value of a file as its field has it: a list as a tuple, an object as a dataclass."""
    if kind is int:
        is_sound = type(value) is int and abs(value) < 1 << 63
    elif kind is float:
        is_sound = type(value) in (int, float) and abs(value) < 1 << 63  # type: ignore[arg-type]
    elif isinstance(kind, type):
        if is_dataclass(kind):
            return value if isinstance(value, kind) else made(kind, value)
        is_sound = isinstance(value, kind)
    else:
        return _composed(value, kind)
    if not is_sound:
        raise TypeError(f"{str(value)[:40]} is no {kind.__name__}")
    return value


def _composed(value: object, kind: Any) -> object:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal and isinstance(value, str) and value in parts:
        return value
    if origin is Mapping and isinstance(value, Mapping):
        return {_value(k, parts[0]): _value(v, parts[1]) for k, v in value.items()}
    if origin is tuple and isinstance(value, list):
        is_endless = parts[1:] == (...,)
        if is_endless or len(parts) == len(value):
            kinds = parts[:1] * len(value) if is_endless else parts
            return tuple(_value(one, its) for one, its in zip(value, kinds, strict=True))
    if origin is UnionType and type(None) in parts and len(parts) == 2:
        return (
            None if value is None else _value(value, next(p for p in parts if p is not type(None)))
        )
    raise TypeError(f"{str(value)[:40]} is no {kind}")
