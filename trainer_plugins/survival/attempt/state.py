"""State: what a forward pass leaves in a model besides gradients; it is compared, and put back."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

_SMALL = 1 << 16
"""Most numbers of a tensor that is copied. Larger ones are tables and masks."""

_MOST_ITEMS = 1024
_DEPTH = 4
"""How large and how deeply nested a list or a dictionary is that is looked into."""

_ABSENT = object()
_OPAQUE = object()
"""Stands for what is no state: modules, functions, outputs that still have their graph."""

_NOT_OF_THE_USER = frozenset(vars(nn.Module())) | {
    *("ds_grads_remaining", "applied_pre_backward_ref_cnt"),
}
"""Attributes that torch and DeepSpeed (runtime/zero) keep on every module."""

Owners = Mapping[str, object]
"""Modules, and objects that they keep, by their path in the model."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Holds what a pass has made of one place."""

    words: str
    """The place, as in "`model.norm.steps`, a buffer of WarmsUp,"."""

    value: object
    is_learned: bool
    """Whether it is a parameter or a buffer of real numbers: statistics of rows, as a rule."""

    is_restorable: bool


class State:
    """Keeps the state of a model at a moment, to find out what has moved, and to put it back.

    Args:
        owners: the objects whose attributes and buffers are kept.
        others: modules whose buffers alone are kept.
        has_parameters: whether small parameters of the owners that are trained are kept too.
    """

    def __init__(
        self,
        owners: Owners,
        others: Mapping[str, object] | None = None,
        *,
        has_parameters: bool = False,
    ) -> None:
        self._owners, self._others = owners, {**(others or {}), **owners}
        self._has_parameters = has_parameters
        self._kept = {place.key: _Kept(place) for place in self._places()}

    def restore(self) -> None:
        """Put everything back, in place."""
        now = {place.key: place for place in self._places()}
        for key, place in now.items():
            if key not in self._kept:
                del place.holder[place.name]
        for kept in self._kept.values():
            kept.restore()

    def moved(self) -> dict[str, Moved]:
        """Return what has another value than at that moment, by its place.

        Frequencies of rotary embeddings are left out: `exact/modules.py` judges them by name.
        """
        moved = {}
        for place in self._places():
            if place.is_frequency:
                continue
            kept = self._kept.get(place.key)
            if kept is None or kept.has_moved():
                is_restorable = kept is None or kept.is_restorable()
                value = _copied(place.holder[place.name])
                moved[place.key] = Moved(place.words, value, place.is_learned, is_restorable)
        return moved

    def _places(self) -> Iterator["_Place"]:
        for path, owner in self._others.items():
            if isinstance(owner, nn.Module):
                yield from _places(path, owner, owner._buffers, "a buffer")
        for path, owner in self._owners.items():
            if isinstance(owner, nn.Module) and self._has_parameters:
                trained = {
                    n
                    for n, p in owner._parameters.items()
                    if p is not None and p.requires_grad and p.numel() <= _SMALL
                }
                yield from _places(path, owner, owner._parameters, "a parameter", trained)
            attributes = vars(owner)
            yield from _places(
                path, owner, attributes, "an attribute", attributes.keys() - _NOT_OF_THE_USER
            )


@dataclass(frozen=True, slots=True)
class _Place:
    """Says where a value is."""

    holder: MutableMapping[str, Any]
    name: str
    key: str
    words: str
    is_learned: bool

    @property
    def is_frequency(self) -> bool:
        """Tell whether it is of a rotary embedding, which replaces it and never writes into it."""
        return self.name.endswith("inv_freq")


def _places(
    path: str,
    owner: object,
    holder: MutableMapping[str, Any],
    kind: str,
    names: Iterable[str] | None = None,
) -> Iterator[_Place]:
    for name in [*(holder if names is None else names)]:
        value = holder[name]
        if _copied(value, is_shallow=True) is _OPAQUE:
            continue
        is_real = torch.is_tensor(value) and value.is_floating_point()
        is_learned = is_real and kind != "an attribute"
        key = f"{path}{'.' if path else ''}{name}"
        words = f"`{key}`, {kind} of {type(owner).__name__},"
        yield _Place(holder, name, key, words, is_learned)


class _Kept:
    """Keeps the value of one place."""

    def __init__(self, place: _Place) -> None:
        self._place, self._value = place, place.holder[place.name]
        self._num_writes = self._value._version if torch.is_tensor(self._value) else 0
        self._copy = None if place.is_frequency else _copied(self._value)

    def is_restorable(self) -> bool:
        """Tell whether the value can be put back: not a large tensor that was written to."""
        return not (torch.is_tensor(self._value) and self._copy is None and self._is_written())

    def has_moved(self) -> bool:
        now = self._place.holder.get(self._place.name, _ABSENT)
        if now is self._value and self._copy is None and torch.is_tensor(now):
            return self._is_written()
        before = self._value if torch.is_tensor(self._value) and self._copy is None else self._copy
        return not is_same(before, now)

    def restore(self) -> None:
        if torch.is_tensor(self._value) and self._copy is not None:
            with torch.no_grad():
                self._value.copy_(self._copy)
        elif isinstance(self._value, np.ndarray):
            self._value[...] = self._copy
        elif isinstance(self._value, list | deque | dict | set):
            content: Any = _copied(self._copy)
            self._value.clear()
            add = self._value.extend if isinstance(self._value, list | deque) else None
            (add or self._value.update)(content)  # type: ignore[union-attr]
        self._place.holder[self._place.name] = self._value

    def _is_written(self) -> bool:
        return bool(self._value._version != self._num_writes)


def is_same(before: object, now: object) -> bool:
    """Tell whether two values are the same.

    Of tensors whose sizes differ the numbers that both have are compared: a mask or a table that
    grew holds what it held.
    """
    if torch.is_tensor(before) and torch.is_tensor(now):
        if before.dim() != now.dim():
            return False
        common = tuple(map(slice, map(min, before.shape, now.shape)))
        one, other = before.detach()[common], now.detach()[common]
        one = one.to(other)  # a layer may make its buffers half as wide in its first pass
        return bool(torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True))
    if isinstance(before, np.ndarray) and isinstance(now, np.ndarray):
        return bool(before.dtype == now.dtype and np.array_equal(before, now))
    if type(before) is not type(now):
        return False
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return before.keys() == now.keys() and all(is_same(v, now[k]) for k, v in before.items())
    if isinstance(before, list | tuple | deque) and isinstance(now, list | tuple | deque):
        return len(before) == len(now) and all(map(is_same, before, now))
    return bool(before == now or (before != before and now != now))


def _copied(value: Any, depth: int = _DEPTH, *, is_shallow: bool = False) -> Any:
    """Copy plain values: numbers, text, small tensors and arrays, and collections of these.

    A large tensor gives None, and what is none of this `_OPAQUE`.
    """
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        return value
    if isinstance(value, torch.Tensor):
        is_plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided
        if not is_plain or value.grad_fn is not None or value.is_meta:
            return _OPAQUE
        if is_shallow:
            return value
        return value.detach().clone() if value.numel() <= _SMALL else None
    if isinstance(value, np.ndarray):
        return value.copy() if value.size <= _SMALL else _OPAQUE
    if isinstance(value, list | tuple | set | frozenset | deque | dict):
        return _copied_items(value, depth)
    return _OPAQUE


def _copied_items(value: Any, depth: int) -> Any:
    if depth == 0 or len(value) > _MOST_ITEMS:
        return _OPAQUE
    items = [*value.values()] if isinstance(value, dict) else [*value]
    copies = [_copied(one, depth - 1) for one in items]
    if any(
        copy is _OPAQUE or (copy is None and one is not None)
        for copy, one in zip(copies, items, strict=True)
    ):
        return _OPAQUE
    if isinstance(value, dict):
        return dict(zip(value, copies, strict=True))
    if isinstance(value, tuple):
        return tuple(copies)
    return type(value)(copies) if type(value) in (list, set, frozenset, deque) else list(copies)
