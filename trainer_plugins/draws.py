"""Draws: finds the random generators that users' objects hold, and restores them."""

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

_MOST_ITEMS = 1000  # longer collections hold rows
_MOST_OBJECTS = 20_000

_CLOSED = (
    type(None), str, bytes, int, float, type, ModuleType, nn.Module, torch.Tensor, np.ndarray,
)  # fmt: skip


class Draws(NamedTuple):
    """The methods of a random generator: its state, and a draw of so many numbers."""

    get: Callable[[], Any]
    put: Callable[[Any], object]
    draw: Callable[[int], object]


def find_draws(one: Any) -> Draws | None:
    """Return the methods of a random generator; None if it is none."""
    if isinstance(one, random.Random):
        return Draws(one.getstate, one.setstate, lambda num: one.getrandbits(64 * num))
    if isinstance(one, np.random.RandomState):
        return Draws(one.get_state, one.set_state, one.random_sample)
    if isinstance(one, torch.Generator):
        draw = partial(torch.rand, generator=one, device=one.device)
        return Draws(one.get_state, one.set_state, draw)
    if isinstance(one, np.random.Generator | np.random.BitGenerator):
        bits: Any = getattr(one, "bit_generator", one)
        return Draws(lambda: deepcopy(bits.state), partial(setattr, bits, "state"), bits.random_raw)
    return None


@contextmanager
def keep_draws(*objects: object) -> Iterator[None]:
    """Restore afterwards the generators that objects hold, such as a data set's own."""
    kept = [(draws, draws.get()) for draws in _walk(objects)]
    try:
        yield
    finally:
        for draws, state in kept:
            draws.put(state)


def _walk(objects: tuple[object, ...]) -> Iterator[Draws]:
    waiting, seen = deque(objects), dict[int, object]()
    while waiting and len(seen) < _MOST_OBJECTS:
        one = waiting.popleft()
        if id(one) in seen or isinstance(one, _CLOSED):
            continue
        seen[id(one)] = one
        if (draws := find_draws(one)) is not None:
            yield draws
        else:
            waiting.extend(_inside(one))


def _inside(one: Any) -> list[object]:
    if isinstance(one, dict):
        return [*one.values()] if len(one) <= _MOST_ITEMS else []
    if isinstance(one, list | tuple | set | frozenset | deque):
        return [*one] if len(one) <= _MOST_ITEMS else []
    if isinstance(one, partial):
        return [one.func, one.args, one.keywords]
    if isinstance(one, MethodType | BuiltinMethodType):
        return [one.__self__, getattr(one, "__func__", None)]
    if isinstance(one, FunctionType):
        known = one.__globals__
        cells = [*vars(one).values(), *(one.__closure__ or ())]
        return [*cells, *(known[name] for name in one.__code__.co_names if name in known)]
    if hasattr(one, "cell_contents"):
        return [one.cell_contents]
    return [*getattr(one, "__dict__", {}).values()]
