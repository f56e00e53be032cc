"""Sources: what a data set, a collator and a Trainer draw from and count with, to restore it."""

import copy
import functools
import io
import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.survival.attempt.state import State
from trainer_plugins.survival.attempt.users_code import is_known
from trainer_plugins.upkeep.frames import is_of_project

_MOST_ITEMS = 1000  # longer collections hold rows, and no generators

_MOST_OBJECTS = 20_000


class Sources:
    """Keeps generators and plain attributes, found through attributes, closures and globals."""

    def __init__(self, *roots: object) -> None:
        self._restores: list[Callable[[], object]] = []
        self.why_not = ""  # what cannot be restored, in words; empty if everything can
        self._owners: dict[str, object] = {}
        self._seen: dict[int, object] = {}
        waiting = deque(roots)
        while waiting and len(self._seen) < _MOST_OBJECTS:
            one = waiting.popleft()
            if id(one) not in self._seen and not isinstance(one, str | int | float | torch.Tensor):
                self._seen[id(one)] = one
                waiting.extend(self._look_at(one))
        self._state = State(self._owners)

    def restore(self) -> None:
        for restore in self._restores:
            restore()
        self._state.restore()

    def _look_at(self, one: Any) -> Iterator[object]:
        if restore := _restore_of(one):
            self._restores.append(restore)
        elif _is_consumed(one):
            self.why_not = f"rows come from a {type(one).__name__}, which cannot be restored"
        elif isinstance(one, dict | list | tuple | set | deque):
            if len(one) <= _MOST_ITEMS:
                yield from one.values() if isinstance(one, dict) else one
        elif isinstance(one, functools.partial):
            yield from (one.func, *one.args, *one.keywords.values())
        elif isinstance(one, types.MethodType):
            yield from (one.__self__, one.__func__)
        elif isinstance(one, types.FunctionType):
            yield from _named_in(one)
        elif hasattr(one, "__dict__") and not isinstance(one, type | nn.Module) and _is_open(one):
            if is_of_project(type(one)):
                self._owners[f"{len(self._owners)}"] = one
                for kind in filter(is_of_project, type(one).__mro__):
                    yield from (v for v in vars(kind).values() if _restore_of(v) or callable(v))
            yield from vars(one).values()


def sources_of(trainer: HfTrainer) -> Sources:
    """Find what a Trainer and its training rows draw from and count with."""
    loader = trainer.callback_handler.train_dataloader
    rows = (getattr(loader, name, None) for name in ("dataset", "collate_fn"))
    return Sources(*rows, trainer)


def _restore_of(one: Any) -> Callable[[], object] | None:
    if isinstance(one, random.Random):
        return functools.partial(one.setstate, one.getstate())
    if isinstance(one, np.random.RandomState):
        return functools.partial(one.set_state, one.get_state())
    if isinstance(one, torch.Generator):
        return functools.partial(one.set_state, one.get_state())
    if isinstance(one, np.random.Generator | np.random.BitGenerator):
        bits: Any = getattr(one, "bit_generator", one)
        return functools.partial(setattr, bits, "state", copy.deepcopy(bits.state))
    return None


def _is_consumed(one: object) -> bool:
    is_built_in = type(one).__module__ in ("builtins", "itertools", "collections")
    is_iterator = hasattr(type(one), "__next__") and not isinstance(one, io.IOBase)
    return is_built_in and is_iterator


def _named_in(function: types.FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is empty still
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    if is_of_project(function):
        for name in function.__code__.co_names:
            yield function.__globals__.get(name)


def _is_open(one: object) -> bool:
    home = type(one).__module__
    return home.startswith("torch.utils.data") or not is_known(home)  # a subset holds a data set
