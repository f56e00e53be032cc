"""Pickle classes and functions by their content if another process cannot import them by name.

A script or a notebook defines them (`__main__`), or a function. The script is not run again, so it
needs no `if __name__ == "__main__":`.
"""

import builtins
import dataclasses
import enum
import functools
import importlib
import itertools
import marshal
import sys
import weakref
from collections.abc import Callable, Iterator, KeysView, ValuesView
from types import (
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    new_class,
)
from typing import Any

# the other process's module for all that cannot be imported, as in multiprocessing
_HOME = "__mp_main__"

_MADE_AGAIN = frozenset(
    {"__dict__", "__weakref__", "__module__", "__qualname__", "__abstractmethods__", "_abc_impl"}
)
_HEAP_TYPE = 1 << 9  # Include/object.h, Py_TPFLAGS_HEAPTYPE: a class made in Python
_numbers: "weakref.WeakKeyDictionary[type, int]" = weakref.WeakKeyDictionary()
_counted = itertools.count()
_made: dict[int, type] = {}  # by number: a class that comes in several pickles is made once

_MARKS = {
    id(getattr(dataclasses, name)): name
    for name in (
        "MISSING",
        "KW_ONLY",
        "_HAS_DEFAULT_FACTORY",
        "_FIELD",
        "_FIELD_CLASSVAR",
        "_FIELD_INITVAR",
    )
    if hasattr(dataclasses, name)
}  # markers that dataclasses compares by identity


class ByValue:
    """Reduces the values of one pickle that cannot be imported."""

    def __init__(
        self,
        can_be_sent: Callable[[object, "ByValue"], bool],
        names_sent: set[str] | None = None,
        names_refused: dict[str, bool] | None = None,
    ) -> None:
        self._can_be_sent = can_be_sent
        self._names_sent = names_sent if names_sent is not None else set()
        self._names_refused = names_refused if names_refused is not None else {}
        self.last_class = ""  # the last class that was sent by its content; errors name it

    def reduce(self, value: object) -> Any:
        """Return what a Pickler's `reducer_override` does: NotImplemented if pickle can send it."""
        if isinstance(value, type):
            is_by_name = not value.__flags__ & _HEAP_TYPE or _has_a_name(value)
            return NotImplemented if is_by_name else self._class(value)
        if isinstance(value, FunctionType):
            return NotImplemented if _has_a_name(value) else self._function(value)
        # by its name, pickle would find the method of the class instead of one that replaced it
        if isinstance(value, MethodType):
            return _method, (value.__func__, value.__self__)
        if isinstance(value, ModuleType) and _can_be_imported(value.__name__):
            return importlib.import_module, (value.__name__,)
        if isinstance(value, (staticmethod, classmethod)):
            return type(value), (value.__func__,)
        if type(value) is property:
            return property, (value.fget, value.fset, value.fdel, value.__doc__)
        if type(value) is functools.cached_property:
            return _cached_property, (value.func, value.attrname)
        if isinstance(value, MappingProxyType):
            return _mapping, (dict(value),)
        # keys and values of a dict, as in the choices of a field of TrainingArguments
        if isinstance(value, (KeysView, ValuesView)):
            return list, ([*value],)
        if id(value) in _MARKS:
            return getattr, (dataclasses, _MARKS[id(value)])
        return NotImplemented

    def _class(self, kind: type) -> tuple[object, ...]:
        self.last_class = kind.__qualname__
        home = _home_of(kind.__module__)
        number = _numbers.setdefault(kind, next(_counted))
        if isinstance(kind, enum.EnumMeta):
            values = [(name, member.value) for name, member in vars(kind)["_member_map_"].items()]
            return _make_enum, (number, kind.__bases__, kind.__name__, home, values)
        # a class with __slots__ makes these for itself
        descriptors = (MemberDescriptorType, GetSetDescriptorType)
        content = {
            name: value
            for name, value in vars(kind).items()
            if name not in _MADE_AGAIN
            and not name.startswith("__annot")
            and not isinstance(value, descriptors)
        }
        slots = {"__slots__": content.pop("__slots__")} if "__slots__" in content else {}
        made = (number, type(kind), kind.__name__, kind.__bases__, {"__module__": home, **slots})
        return _make_class, made, (kind.__qualname__, content), None, None, _fill_class

    def _function(self, function: FunctionType) -> tuple[object, ...]:
        home = _home_of(function.__globals__.get("__name__"))
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        told = {
            name: getattr(function, name)
            for name in ("__name__", "__qualname__", "__defaults__", "__kwdefaults__")
        }
        names = {}
        if home == _HOME:
            names = dict(self._names_of(function))
            if hasattr(function, "__wrapped__"):
                told["__wrapped__"] = function.__wrapped__
        made = (marshal.dumps(function.__code__), home, len(cells))
        return _make_function, made, (cells, told, names), None, None, _fill_function

    def _names_of(self, function: FunctionType) -> Iterator[tuple[str, object]]:
        """Yield the names of its script that a function uses and that can be sent, with values."""
        for name in sorted(set(_names_in(function.__code__)) - self._names_sent):
            if name not in function.__globals__ or name == "__builtins__":
                continue
            value = function.__globals__[name]
            self._names_sent.add(name)
            if name not in self._names_refused:
                # what refers to itself can be sent if the rest of it can
                self._names_refused[name] = False
                beneath = ByValue(self._can_be_sent, {*self._names_sent}, self._names_refused)
                self._names_refused[name] = not self._can_be_sent(value, beneath)
            if not self._names_refused[name]:
                yield name, value


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _has_a_name(value: Any) -> bool:
    """Return whether another process finds this very value under its name."""
    if not _can_be_imported(value.__module__):
        return False
    found: object = sys.modules[value.__module__]
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


def _can_be_imported(module: str | None) -> bool:
    return (
        module != "__main__"
        and getattr(sys.modules.get(module or ""), "__spec__", None) is not None
    )


def _home_of(module: str | None) -> str:
    return str(module) if _can_be_imported(module) else _HOME


def _module(name: str) -> ModuleType:
    if name != _HOME:
        return importlib.import_module(name)
    found = sys.modules.get(name)
    # multiprocessing gives that name to `__main__` too
    if found is None or found is sys.modules["__main__"]:
        found = sys.modules[name] = ModuleType(name)
        vars(found)["__builtins__"] = builtins  # as in every module that is run
    return found


def _make_class(
    number: int, metaclass: type, name: str, bases: tuple[type, ...], first: dict[str, str]
) -> type:
    if number not in _made:
        _module(first["__module__"])  # code looks there for the names of its annotations
        _made[number] = new_class(
            name, bases, {"metaclass": metaclass}, lambda namespace: namespace.update(first)
        )
    return _made[number]


def _fill_class(kind: type, state: tuple[str, dict[str, object]]) -> None:
    kind.__qualname__, content = state
    for name, value in content.items():
        setattr(kind, name, value)
    if hasattr(kind, "__abstractmethods__"):
        import abc

        abc.update_abstractmethods(kind)


def _make_enum(
    number: int, bases: tuple[type, ...], name: str, home: str, members: list[tuple[str, object]]
) -> type:
    def fill(namespace: dict[str, object]) -> None:
        for member, value in (("__module__", home), *members):
            # one by one: that is how an enum learns of them
            namespace[member] = value  # noqa: PERF403

    if number not in _made:
        _made[number] = new_class(name, bases, {}, fill)
    return _made[number]


# pickle cannot import the classes MethodType and MappingProxyType by their names
def _method(function: Callable[..., object], owner: object) -> MethodType:
    return MethodType(function, owner)


def _mapping(content: dict[object, object]) -> MappingProxyType[object, object]:
    return MappingProxyType(content)


def _cached_property(
    function: Callable[[object], object], name: str | None
) -> functools.cached_property[object]:
    made = functools.cached_property(function)
    made.attrname = name
    return made


def _make_function(code: bytes, home: str, num_cells: int) -> FunctionType:
    loaded: CodeType = marshal.loads(code)
    return FunctionType(
        loaded, vars(_module(home)), closure=tuple(CellType() for _ in range(num_cells))
    )


def _fill_function(
    function: FunctionType, state: tuple[list[object], dict[str, object], dict[str, object]]
) -> None:
    cells, told, names = state
    for cell, content in zip(function.__closure__ or (), cells, strict=True):
        cell.cell_contents = content
    for name, value in told.items():
        setattr(function, name, value)
    function.__globals__.update(names)
