"""State: compares and restores everything that a pass changes besides gradients."""

import math
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import cache
from numbers import Number
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import nn

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.survival.attempt.generators import Generators
from trainer_plugins.survival.attempt.holders import (
    MOST_ITEMS,
    Contents,
    Holder,
    Roots,
    attributes_of,
    buffers_of,
    describe_mapping,
    walk,
)

_SMALL = 1 << 16  # largest tensor to copy, in numbers. Larger ones are tables and masks.

_DEPTH = 8  # deepest nesting of a list or dictionary to compare

GROWN = "[...]"  # marks items appended to a list

_ABSENT = object()
_PLAIN = (type(None), str, bytes, Number, np.generic)
_OPAQUE = object()  # stands for values that are no state: modules, functions, outputs with a graph

# Where TRL's trainers collect logged metrics, under "train" and "eval"; the second: ORPO and CPO.
_METRICS = ("_metrics", "_stored_metrics")


class Moved(NamedTuple):
    """A change that a pass made in one place."""

    words: str  # the place, such as "`model.norm.steps`, a buffer of WarmsUp,"
    value: object
    is_learned: bool  # a real-valued parameter or buffer: statistics of rows
    is_restorable: bool


class State:
    """Keeps values reachable from roots, and a model's other buffers, to compare and restore."""

    def __init__(
        self, roots: Roots, model: nn.Module | None = None, *, has_parameters: bool = False
    ) -> None:
        self._kept: list[tuple[Holder, Contents]] = []
        self._draws: list[tuple[Holder, Contents]] = []  # generators, and their states
        self._leaves: dict[int, _Leaf] = {}
        modules = dict(model.named_modules()) if model is not None else {}
        for path, module in modules.items():
            if path not in roots.objects and module._buffers:
                self._keep(buffers_of(path, module))
        users = roots.objects.keys() | roots.apart.keys()
        if has_parameters and users:  # the user's code may move any of them
            for path, module in {**modules, **roots.apart}.items():
                self._keep(_parameters(path, module, is_users=path in users))
        for holder, contents in walk(roots):
            self._keep(holder, contents)

    def _keep(self, holder: Holder, contents: Contents | None = None) -> None:
        contents = holder.read() if contents is None else contents
        if holder.draw is not None:
            self._draws.append((holder, contents))
        else:  # a tuple stays as it is, but a tensor in it may be written into
            self._kept.append((holder, contents))
            for name, value in contents.items():
                is_leaf = isinstance(value, torch.Tensor | np.ndarray)
                if is_leaf and id(value) not in self._leaves and not _is_frequency(name):
                    self._leaves[id(value)] = _Leaf(value)

    def restore(self, notes: Container[str] = ()) -> None:
        """Restore all places except the `notes`, which count or record rows."""
        for leaf in self._leaves.values():
            leaf.restore()
        for holder, kept in self._kept:
            now = holder.read()
            if holder.write is not None and not _is_untouched(kept, now):
                if holder.path + GROWN in notes and holder.find_growth(kept, now):
                    continue
                opaque = {name: value for name, value in now.items() if _is_opaque(value)}
                goes_on = {n: now[n] for n in now if notes and holder.path_of(n) in notes}
                holder.write(({} if holder.is_items else opaque) | kept | goes_on)

    def restore_draws(self) -> None:
        """Make generators held by objects draw the same numbers again."""
        for holder, kept in self._draws:
            assert holder.write is not None
            holder.write(kept)

    def read_generators(self) -> list[object]:
        """Return the current states of the generators held by objects."""
        return [holder.read()[""] for holder, _ in self._draws]

    def draw_more(self, num: int) -> None:
        """Make generators held by objects draw `num` numbers."""
        for holder, _ in self._draws:
            if holder.draw is not None and num:
                holder.draw(num)

    def name_consumed(self) -> Iterator[str]:
        """Describe each object that yields values and cannot go back."""
        return (holder.words for holder, _ in self._kept if holder.is_consumed)

    def find_moved(self) -> dict[str, Moved]:
        """Return all changes since, except frequencies (`accumulation/modules.py` judges those)."""
        moved = {}
        for holder, kept in self._kept:
            contents = holder.read()
            if grown := holder.find_growth(kept, contents):
                words = f"`{holder.path}`, a list that grows,"
                value = [_copy(one) for one in grown]
                moved[holder.path + GROWN] = Moved(words, value, False, True)
                contents = {name: contents[name] for name in kept}
            for name, now in contents.items():
                before = kept.get(name, _ABSENT)
                has_moved = holder.is_consumed or self._has_moved(before, now)
                if not has_moved or _is_frequency(name) or _is_opaque(now):
                    continue
                key = holder.path_of(name)
                leaf = self._leaves.get(id(before))
                is_real = torch.is_tensor(now) and now.is_floating_point()
                is_of_module = holder.words.startswith(("a buffer", "a parameter"))
                is_lost = holder.is_consumed or (leaf is not None and not leaf.is_restorable())
                words = f"`{key}`, {holder.words},"
                moved[key] = Moved(words, _copy(now), is_real and is_of_module, not is_lost)
        return moved

    def _has_moved(self, before: Any, now: Any) -> bool:
        leaf = self._leaves.get(id(before))
        if now is before:
            return leaf is not None and leaf.has_moved()
        return not is_same(_copy(before) if leaf is None else leaf.copy(), _copy(now))


class _Leaf:
    def __init__(self, value: Any) -> None:
        self._value = value
        self._copy = None if _is_opaque(value) else _copy(value)
        self._mark = self._read_mark() if self._copy is None else None

    def _read_mark(self) -> int:
        if torch.is_tensor(self._value):
            return 0 if self._value.is_inference() else int(self._value._version)
        return crc32(np.ascontiguousarray(self._value).view(np.uint8).data)

    def copy(self) -> object:
        return _copy(self._value) if self._copy is None else self._copy

    def is_restorable(self) -> bool:
        return self._copy is not None or self._read_mark() == self._mark

    def has_moved(self) -> bool:
        if self._copy is None:
            return self._read_mark() != self._mark
        return not is_same(self._copy, self._value)

    def restore(self) -> None:
        if torch.is_tensor(self._copy):
            with torch.no_grad():
                self._value.copy_(self._copy)
        elif self._copy is not None:
            self._value[...] = self._copy


def _parameters(path: str, module: nn.Module, *, is_users: bool) -> Holder:
    """Describe the parameters that a pass may move: frozen ones, and small ones of the user's."""
    names = [
        name
        for name, one in module._parameters.items()
        if one is not None and (not one.requires_grad or (is_users and one.numel() <= _SMALL))
    ]
    words = f"a parameter of {type(module).__name__}"
    return describe_mapping(path, words, module._parameters, lambda: names)


def _is_untouched(kept: Contents, now: Contents) -> bool:
    return [*kept] == [*now] and all(now[name] is value for name, value in kept.items())


def _is_frequency(name: object) -> bool:
    """Return whether a rotary embedding owns it, which replaces it and never writes into it."""
    return isinstance(name, str) and name.endswith("inv_freq")


def is_same(before: object, now: object, seen: set[tuple[int, int]] | None = None) -> bool:
    """Compare two values. Of tensors, only the common part counts: a mask may grow.

    `seen` has the pairs that are being compared: objects that know each other meet many times.
    """
    if torch.is_tensor(before) and torch.is_tensor(now):
        if before.dim() != now.dim():
            return False
        common = tuple(map(slice, map(min, before.shape, now.shape)))
        one, other = before.detach()[common], now.detach()[common]
        one = one.to(other)  # a layer may make its buffers half precision in its first pass
        return bool(torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True))
    if isinstance(before, np.ndarray) and isinstance(now, np.ndarray):
        return bool(before.dtype == now.dtype and np.array_equal(before, now))
    if type(before) is not type(now):
        return False
    seen, pair = set() if seen is None else seen, (id(before), id(now))
    if pair in seen:
        return True
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        seen.add(pair)
        is_alike = before.keys() == now.keys()
        return is_alike and all(is_same(v, now[k], seen) for k, v in before.items())
    if isinstance(before, list | tuple | deque) and isinstance(now, list | tuple | deque):
        seen.add(pair)
        is_alike = len(before) == len(now)
        return is_alike and all(is_same(*two, seen) for two in zip(before, now, strict=True))
    return bool(before == now or (before != before and now != now))


def _is_opaque(value: Any) -> bool:
    """Return whether a value is no state of its own, or cannot be compared."""
    if isinstance(value, _PLAIN):
        return False
    if isinstance(value, torch.Tensor):
        is_plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided
        # torch compares no quantized tensors, and writes into none of inference_mode.
        is_plain = is_plain and not (value.is_quantized or value.is_inference())
        return not is_plain or value.grad_fn is not None or value.is_meta
    if isinstance(value, np.ndarray | list | tuple | set | frozenset | deque | dict):
        return False
    return isinstance(value, nn.Module) or next(attributes_of(value), None) is None


_Made = dict[tuple[int, int], tuple[Any, Any]]  # by number and depth: a value, and its copy


def _copy(value: Any, depth: int = _DEPTH, made: _Made | None = None) -> Any:
    """Copy comparable values; None for a large tensor, `_OPAQUE` for values that are no state.

    `made` has the copies so far: objects that know each other are copied once per depth.
    """
    made, key = {} if made is None else made, (id(value), depth)
    if key not in made:
        made[key] = value, _copy_anew(value, depth, made)
    return made[key][1]


def _copy_anew(value: Any, depth: int, made: _Made) -> Any:
    if depth == 0 or _is_opaque(value):
        return _OPAQUE
    if isinstance(value, torch.Tensor | np.ndarray):
        is_small = math.prod(value.shape) <= _SMALL
        if torch.is_tensor(value):
            return value.detach().clone() if is_small else None
        return value.copy() if is_small else None
    if isinstance(value, list | tuple | deque):
        return [_copy(item, depth - 1, made) for item in [*value][-MOST_ITEMS:]]
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, set | frozenset):
        return set(value)
    held: Contents = {}
    if not isinstance(value, dict):
        held["class"] = type(value).__name__
        for holder in attributes_of(value):
            held |= holder.read()
    return {name: _copy(item, depth - 1, made) for name, item in (held or value).items()}


def explain_not_divided(moved: Iterable[Moved]) -> str:
    """Return why a change made by one pass forbids splitting; empty if it does not."""
    # Counts, flags and attributes are restored for each piece: they are the same for all rows.
    for one in moved:
        if one.is_learned or not one.is_restorable:
            return (
                f"{one.words} changes in each forward pass in training: each piece would start "
                "from the value that the one before left"
            )
    return ""


def explain_rows_differ(
    first: Mapping[str, Moved], other: Mapping[str, Moved], overwritten: Container[str]
) -> str:
    """Return why passes over different rows changed a model differently; empty if they did not."""
    for key, moved in {**first, **other}.items():
        one, two = first.get(key), other.get(key)
        if key not in overwritten and not is_same(one and one.value, two and two.value):
            return f"each pass changes {moved.words} depending on its rows"
    return ""


@cache
def _is_trls(trainer: type) -> bool:
    return any(kind.__module__.startswith("trl.") for kind in trainer.__mro__)


class RestorePoint:
    """Saves all random generators, the counts of a TRL trainer, and a model's state."""

    def __init__(
        self,
        trainer: HfTrainer,
        mode: str = "train",
        state: State | None = None,
        notes: Container[str] = (),
        loss: State | None = None,  # what a user's loss keeps: pieces go on with it
    ) -> None:
        self._trainer, self._mode, self._notes = trainer, mode, notes
        self.state, self._loss = state or State(Roots({}, ())), loss
        self._generators = Generators(trainer.args.device)
        self._num_tokens = getattr(trainer, "_total_train_tokens", None)
        self._ends = [
            {name: (len(values), values[-1]) for name, values in metrics.items() if values}
            for metrics in self._metrics()
        ]

    def restore(self) -> None:
        self.put_back()
        if self._loss is not None:
            self._loss.restore()

    def put_back(self) -> None:
        """Restore all but what a user's loss keeps: a measurement has to see if that changes it."""
        self._generators.restore()
        self.state.restore_draws()
        self.state.restore()
        self.restore_metrics()

    def begin_next(self) -> None:
        """Restore all for the next part, which draws other numbers and records its own rows."""
        self.state.restore(self._notes)
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
            return []  # in a user's own Trainer these names may mean something else
        there = vars(self._trainer)
        return [there[name][self._mode] for name in _METRICS if name in there]
