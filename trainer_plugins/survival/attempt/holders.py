"""Holders: finds values that code outside libraries keeps between two calls, wherever they are."""

import copyreg
import io
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from trainer_plugins.draws import find_draws
from trainer_plugins.survival.attempt.users_code import (
    is_users_object,
    module_of,
    names_in,
)
from trainer_plugins.upkeep.stack import is_of_project

MOST_ITEMS = 1000  # longer collections hold rows: we compare them but do not descend
_MOST_KEPT = 100_000  # even longer ones are data
_MOST_OBJECTS = 20_000

_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes, type, types.ModuleType))

# These modules of the standard library hold whatever a user puts into their objects.
_OPEN = ("types", "argparse", "collections", "dataclasses")

OF_LIBRARIES = frozenset(vars(nn.Module())) | {
    "ds_grads_remaining",
    "applied_pre_backward_ref_cnt",
    "_external_params",
}  # attributes that torch and DeepSpeed (runtime/zero) put on every module

Contents = dict[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Holder:
    """A place that keeps values by name or number: an object, a list, a closure."""

    path: str  # such as "model.norm.helper"
    words: str  # the kind of a value in it: "an attribute of Helper"
    read: Callable[[], Contents]
    write: Callable[[Contents], object] | None = None  # None: it cannot change
    is_items: bool = False  # values are indexed with [...]
    draw: Callable[[int], object] | None = None  # for a generator: draws that many numbers
    is_consumed: bool = False  # it advances with each value that it yields
    is_code: bool = False  # a function or a class keeps it
    is_list: bool = False

    def find_growth(self, kept: Contents, now: Contents) -> list[object]:
        """Return the items appended to a list that still has all its earlier ones."""
        is_kept = self.is_list and all(now.get(name, now) is value for name, value in kept.items())
        return [*now.values()][len(kept) :] if is_kept else []

    def path_of(self, name: object) -> str:
        if name == "":
            return self.path
        if self.is_items:
            return f"{self.path}[{name!r}]"
        return f"{self.path}.{name}" if self.path else str(name)


class Roots(NamedTuple):
    """The start of a walk: objects by their paths, and places kept by their classes' code."""

    objects: Mapping[str, object]
    code: tuple[Holder, ...] | None = None  # None: search for it, which takes longer
    apart: Mapping[str, nn.Module] = types.MappingProxyType({})  # modules that are not the model's

    def join(self, others: "Roots") -> "Roots":
        code = (*(self.code or ()), *(others.code or ()))
        apart = {**self.apart, **others.apart}
        return Roots({**self.objects, **others.objects}, code, apart)


def walk(roots: Roots) -> Iterator[tuple[Holder, Contents]]:
    """Yield each place reachable from the roots, with its contents; skip libraries' objects."""
    looks_at_code, seen = roots.code is None, dict[int, object]()
    waiting = deque[tuple[str, object]]()

    def follow(holder: Holder) -> Contents:
        contents = holder.read()
        if holder.draw is None and len(contents) <= MOST_ITEMS:
            for name, value in contents.items():
                if type(value) not in _ATOMS and not isinstance(value, torch.Tensor | np.ndarray):
                    waiting.append((holder.path_of(name), value))
        return contents

    for holder in roots.code or ():
        yield holder, follow(holder)
    waiting.extend(roots.objects.items())
    while waiting and len(seen) < _MOST_OBJECTS:
        path, one = waiting.popleft()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        for holder in _holders(path, one, is_root=path in roots.objects):
            yield holder, follow(holder)
        if looks_at_code:
            for holder in _describe_code(path, one):
                yield holder, follow(holder)


def describe_mapping(
    path: str,
    words: str,
    held: Any,
    names: Callable[[], Any],
    *,
    is_items: bool = False,
    is_code: bool = False,
) -> Holder:
    """Describe a mapping, or some of its names."""

    def write(kept: Contents) -> None:
        for name in [name for name in names() if name not in kept]:
            del held[name]
        held.update(kept)

    def read() -> Contents:
        return {name: held[name] for name in names()}

    return Holder(path, words, read, write, is_items, is_code=is_code)


def buffers_of(path: str, module: nn.Module) -> Holder:
    """Describe the buffers of a module."""
    words = f"a buffer of {type(module).__name__}"
    return describe_mapping(path, words, module._buffers, lambda: [*module._buffers])


def own_names(module: nn.Module) -> list[str]:
    """Return the names of a module's attributes that are not torch's own, in their order."""
    return [name for name in vars(module) if name not in OF_LIBRARIES]


def is_open(one: object) -> bool:
    """Return whether to look inside an object: torch's Subset, for one, holds a user's data set."""
    home = module_of(type(one))
    is_given = home.startswith("torch.utils.data") or home.partition(".")[0] in _OPEN
    return is_given or is_users_object(one)


def _holders(path: str, one: Any, *, is_root: bool) -> Iterator[Holder]:
    if (draws := find_draws(one)) is not None:
        get, put = draws.get, draws.put
        yield Holder(path, "", lambda: {"": get()}, lambda kept: put(kept[""]), draw=draws.draw)
    elif is_consumed(one):
        yield Holder(path, f"a {type(one).__name__}", lambda: {"": None}, is_consumed=True)
    elif isinstance(one, list | deque | tuple | dict | set | frozenset):
        if len(one) <= _MOST_KEPT:
            yield _collection(path, one)
    elif isinstance(one, partial):
        inside = {"func": one.func, "args": one.args, "keywords": one.keywords}
        yield Holder(path, "", lambda: inside)
    elif isinstance(one, types.MethodType | types.BuiltinMethodType):
        inside = {"": one.__self__, "__func__": getattr(one, "__func__", None)}
        yield Holder(path, "", lambda: inside)
    elif isinstance(one, nn.Module):
        if is_root:
            yield _attributes(path, one, lambda: own_names(one))
            yield buffers_of(path, one)
    else:
        yield from attributes_of(one, path)


def attributes_of(one: Any, path: str = "") -> Iterator[Holder]:
    """Describe the attributes of an object whose class comes from no library."""
    if isinstance(one, type | types.FunctionType) or not is_open(one):
        return
    if hasattr(one, "__dict__"):
        yield _attributes(path, one, lambda: [*vars(one)])
    if slots := copyreg._slotnames(type(one)):  # type: ignore[attr-defined]
        yield _describe_slots(path, one, slots)


def _attributes(path: str, one: Any, names: Callable[[], Any], *, is_code: bool = False) -> Holder:
    words = f"an attribute of {type(one).__name__}"
    return describe_mapping(path, words, vars(one), names, is_code=is_code)


def _collection(path: str, one: Any) -> Holder:
    words = f"an entry of a {type(one).__name__}"
    if isinstance(one, dict):
        return describe_mapping(path, words, one, lambda: [*one], is_items=True)
    if isinstance(one, tuple | frozenset):
        return Holder(path, words, lambda: dict(enumerate(one)), is_items=True)

    def write(kept: Contents) -> None:
        one.clear()
        (one.update if isinstance(one, set) else one.extend)(kept.values())

    if isinstance(one, set):  # it has no order
        return Holder(path, words, lambda: dict(zip(one, one, strict=True)), write, is_items=True)
    is_list = isinstance(one, list)
    return Holder(path, words, lambda: dict(enumerate(one)), write, is_items=True, is_list=is_list)


def _describe_code(path: str, one: object) -> Iterator[Holder]:
    """Describe the values that functions and classes keep, and follow them to other code."""
    if isinstance(one, types.FunctionType):
        yield from _describe_function(path, one)
        return
    for kind in filter(is_of_project, type(one).__mro__):
        code = {n: v for n, v in vars(kind).items() if is_code(v)}
        yield Holder(path, "", code.copy)
        if names := [n for n in vars(kind) if n not in code and not n.startswith("__")]:
            yield _describe_slots(path, kind, names)


def is_code(value: object) -> bool:
    """Return whether a value is a function, a class or a module of Python: no state itself."""
    is_descriptor = hasattr(type(value), "__get__") and not isinstance(value, nn.Module)
    return is_descriptor or isinstance(value, type | types.ModuleType)


def _describe_function(path: str, one: types.FunctionType) -> Iterator[Holder]:
    name = one.__name__
    given = dict(enumerate(one.__defaults__ or ())) | (one.__kwdefaults__ or {})
    if given:
        yield Holder(path, f"a default of {name}", given.copy, is_items=True, is_code=True)
    if vars(one):
        yield _attributes(path, one, lambda: [*vars(one)], is_code=True)
    if one.__closure__:
        cells = dict(zip(one.__code__.co_freevars, one.__closure__, strict=True))
        yield _describe_cells(path, name, cells)
    if is_of_project(one):
        known = one.__globals__
        used = {n: known[n] for n in names_in(one.__code__) if n in known}
        code = {n: v for n, v in used.items() if is_code(v)}
        yield Holder("", "", code.copy)
        if names := used.keys() - code.keys():
            words = f"a global variable of {one.__module__}"
            yield describe_mapping("", words, known, lambda: names & known.keys(), is_code=True)


def _describe_cells(path: str, name: str, cells: dict[str, types.CellType]) -> Holder:
    def read() -> Contents:
        found = {}
        for name, cell in cells.items():
            with suppress(ValueError):  # still empty
                found[name] = cell.cell_contents
        return found

    def write(kept: Contents) -> None:
        for name, value in kept.items():
            cells[name].cell_contents = value

    return Holder(path, f"a variable around {name}", read, write, is_code=True)


def _describe_slots(path: str, one: Any, names: list[str]) -> Holder:
    """Describe attributes that are in no writable dictionary."""
    is_class = isinstance(one, type)
    words = f"an attribute of {one.__name__ if is_class else type(one).__name__}"

    def read() -> Contents:
        if is_class:
            return {n: v for n, v in vars(one).items() if n in names}
        return {name: getattr(one, name) for name in names if hasattr(one, name)}

    def write(kept: Contents) -> None:
        now, put = read(), type.__setattr__ if is_class else object.__setattr__
        for name, value in kept.items():
            if name not in now or now[name] is not value:
                put(one, name, value)

    return Holder(path, words, read, write, is_code=is_class)


def is_consumed(one: object) -> bool:
    """Return whether a built-in object yields values one by one and cannot go back."""
    is_built_in = type(one).__module__ in ("builtins", "itertools", "collections")
    is_iterator = hasattr(type(one), "__next__") and not isinstance(one, io.IOBase)
    return is_built_in and is_iterator
