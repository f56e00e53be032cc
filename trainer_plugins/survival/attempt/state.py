"""State: what a pass leaves behind besides gradients; it is compared, and restored."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.survival.attempt.generators import Generators
from trainer_plugins.survival.attempt.users_code import is_users_function, is_users_object

_SMALL = 1 << 16  # most numbers of a tensor that is copied. Larger ones are tables and masks.

_MOST_ITEMS = 1024
_DEPTH = 4  # how large and how deeply nested a list or a dictionary is that is looked into

_ABSENT = object()
_OPAQUE = object()  # stands for what is no state: modules, functions, outputs with a graph

_OF_LIBRARIES = frozenset(vars(nn.Module())) | {
    "ds_grads_remaining",
    "applied_pre_backward_ref_cnt",
    "_external_params",
}  # what torch and DeepSpeed (runtime/zero) keep on every module

# Where TRL's trainers collect what they log, under "train" and "eval"; the second of trl < 1.0.
_METRICS = ("_metrics", "_stored_metrics")

Owners = Mapping[str, object]  # modules, and objects that they keep, by their path in the model


@dataclass(frozen=True, slots=True)
class Moved:
    """Holds what a pass has changed in one place."""

    words: str  # the place, as in "`model.norm.steps`, a buffer of WarmsUp,"
    value: object
    is_learned: bool  # whether it is a parameter or a buffer of real numbers: statistics of rows
    is_restorable: bool


class State:
    """Keeps the state of owners, and buffers of others, to compare it later and to restore it."""

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
        now = {place.key: place for place in self._places()}
        for key, place in now.items():
            if key not in self._kept:
                del place.holder[place.name]
        for kept in self._kept.values():
            kept.restore()

    def moved(self) -> dict[str, Moved]:
        """Return what has changed since, but frequencies (`accumulation/modules.py` judges)."""
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
        for path, module in self._others.items():
            if isinstance(module, nn.Module):
                yield from _places(path, module, module._buffers, "a buffer")
        for path, owner in self._owners.items():
            if isinstance(owner, nn.Module) and self._has_parameters:
                trained = {
                    n
                    for n, p in owner._parameters.items()
                    if p is not None and p.requires_grad and p.numel() <= _SMALL
                }
                yield from _places(path, owner, owner._parameters, "a parameter", trained)
            own = [name for name in vars(owner) if name not in _OF_LIBRARIES]
            yield from _places(path, owner, vars(owner), "an attribute", own)


@dataclass(frozen=True, slots=True)
class _Place:
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
        key = f"{path}.{name}" if path else name
        words = f"`{key}`, {kind} of {type(owner).__name__},"
        yield _Place(holder, name, key, words, is_real and kind != "an attribute")


class _Kept:
    def __init__(self, place: _Place) -> None:
        self._place, self._value = place, place.holder[place.name]
        self._num_writes = self._value._version if torch.is_tensor(self._value) else 0
        self._copy = None if place.is_frequency else _copied(self._value)

    def is_restorable(self) -> bool:
        return not (self._is_uncopied_tensor() and self._is_written())

    def has_moved(self) -> bool:
        now = self._place.holder.get(self._place.name, _ABSENT)
        if self._is_uncopied_tensor():
            return self._is_written() if now is self._value else not is_same(self._value, now)
        return not is_same(self._copy, now)

    def restore(self) -> None:
        if torch.is_tensor(self._value) and self._copy is not None:
            with torch.no_grad():
                self._value.copy_(self._copy)
        elif isinstance(self._value, np.ndarray):
            self._value[...] = self._copy
        elif isinstance(self._value, list | deque):
            self._value.clear()
            self._value.extend(_copied(self._copy))
        elif isinstance(self._value, dict | set):
            self._value.clear()
            self._value.update(_copied(self._copy))
        self._place.holder[self._place.name] = self._value

    def _is_uncopied_tensor(self) -> bool:
        return torch.is_tensor(self._value) and self._copy is None

    def _is_written(self) -> bool:
        return bool(self._value._version != self._num_writes)


def is_same(before: object, now: object) -> bool:
    """Tell whether two values are the same; of tensors the part that both have: a mask may grow."""
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
    """Copy plain values and collections; a large tensor gives None, anything else `_OPAQUE`."""
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
    copies = []
    for item in value.values() if isinstance(value, dict) else value:
        copy = _copied(item, depth - 1)
        if copy is _OPAQUE or (copy is None and item is not None):
            return _OPAQUE
        copies.append(copy)
    if isinstance(value, dict):
        return dict(zip(value, copies, strict=True))
    if isinstance(value, tuple):
        return tuple(copies)
    return type(value)(copies) if type(value) in (list, set, frozenset, deque) else copies


def owners_of_state(model: nn.Module) -> dict[str, object]:
    """Find modules that the user wrote or hooked, and objects that they keep, by their paths."""
    owners: dict[str, object] = {}
    for path, module in model.named_modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if not (is_users_object(module) or any(map(is_users_function, (*hooks, module.forward)))):
            continue
        owners[path] = module
        for name, value in vars(module).items():
            if hasattr(value, "__dict__") and not callable(value) and is_users_object(value):
                owners[f"{path}.{name}"] = value
    return owners


def full_state(model: nn.Module, *, has_parameters: bool) -> State:
    """Keep all that a pass may move: of libraries' modules the buffers."""
    modules = dict(model.named_modules())
    return State(owners_of_state(model), modules, has_parameters=has_parameters)


def why_not_divided(moved: Iterable[Moved]) -> str:
    """Say why what one pass has moved forbids a division; empty if it does not."""
    # Counts, flags and attributes are restored for each piece: they are the same for all rows.
    for one in moved:
        if one.is_learned or not one.is_restorable:
            return (
                f"{one.words} is moved by each forward pass in training: pieces need several "
                "passes, and each would see it as the one before left it"
            )
    return ""


def why_rows_differ(
    first: Mapping[str, Moved], other: Mapping[str, Moved], overwritten: Iterable[str]
) -> str:
    """Say why two passes over different rows moved a model differently; empty if not."""
    for key in (other.keys() | first.keys()) - set(overwritten):
        one, two = first.get(key), other.get(key)
        if not is_same(one and one.value, two and two.value):
            moved = two or one
            assert moved is not None
            return f"each pass moves {moved.words} according to its rows"
    return ""


@cache
def _is_trls(trainer: type) -> bool:
    return any(kind.__module__.startswith("trl.") for kind in trainer.__mro__)


class RestorePoint:
    """Keeps all random generators, the counts of a TRL trainer, and a model's state."""

    def __init__(self, trainer: HfTrainer, mode: str = "train", state: State | None = None) -> None:
        self._trainer, self._mode = trainer, mode
        self.state = state or State({})
        self._generators = Generators(trainer.args.device)
        self._num_tokens = getattr(trainer, "_total_train_tokens", None)
        self._ends = [
            {name: (len(values), values[-1]) for name, values in metrics.items() if values}
            for metrics in self._metrics()
        ]

    def restore(self) -> None:
        self._generators.restore()
        self.begin_next()

    def begin_next(self) -> None:
        """Restore all except the generators, for the next part: it draws other numbers."""
        self.state.restore()
        self.restore_metrics()

    def restore_metrics(self) -> None:
        if self._num_tokens is not None:
            vars(self._trainer)["_total_train_tokens"] = self._num_tokens
        for metrics, ends in zip(self._metrics(), self._ends, strict=True):
            for name in list(metrics):
                if name in ends:
                    length, last = ends[name]
                    metrics[name][length - 1 :] = [last]
                else:
                    del metrics[name]

    def _metrics(self) -> list[dict[str, list[object]]]:
        if not _is_trls(type(self._trainer)):
            return []  # a user's own Trainer may mean something else by these names
        there = vars(self._trainer)
        return [there[name][self._mode] for name in _METRICS if name in there]
