"""Generators: detects and restores the random numbers that a pass draws."""

import ctypes
import random
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

_NUM_WORDS = 624  # state of a Mersenne twister, as 32-bit words
_NUM_BYTES = 4 * _NUM_WORDS + 4  # those, and the position of the next one


class _Numpys:
    """Reads the state of numpy's generator, which takes 24 us only after a draw."""

    def __init__(self) -> None:
        self._module: Any = np.random
        self._state: Any = None
        self._memory: bytes | None = None  # of this state; None if incomplete

    @property
    def generator(self) -> Any:
        return self._module.get_bit_generator()

    def state(self) -> Any:
        """Return the state: the same object until a number is drawn."""
        generator = self.generator
        memory = None
        if type(generator) is np.random.MT19937:
            # numpy's mt19937.h: the words, then the position
            memory = ctypes.string_at(generator.ctypes.state_address, _NUM_BYTES)
        if memory is None or memory != self._memory:
            state, self._memory = self._module.get_state(legacy=False), None
            if memory is not None:
                held = state["state"]
                is_there = memory == held["key"].tobytes() + np.int32(held["pos"]).tobytes()
                # The second of a pair of normal numbers is taken without changing the memory.
                self._memory = memory if is_there and not state["has_gauss"] else None
            if self._state is None or not _is_same(state, self._state):
                self._state = state
        return self._state

    def restore(self, state: Any) -> None:
        self._module.set_state(state)
        self._memory = None  # the state may hold the second of a pair


class _Pythons:
    def __init__(self) -> None:
        self._state: Any = None

    def state(self) -> Any:
        """Return the state: the same object until a number is drawn."""
        now = random.getstate()
        if now != self._state:
            self._state = now
        return self._state


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[k], other[k]) for k in one)
    return bool(np.array_equal(one, other))


_numpys_reader, _pythons_reader = _Numpys(), _Pythons()


def pythons_and_numpys() -> tuple[object, object]:
    """Return the states of Python's and numpy's generators: the same objects until a draw."""
    return _pythons_reader.state(), _numpys_reader.state()


class _DrawnAgain:
    """Replays earlier draws of Python and numpy, then continues where they were before."""

    def __init__(self) -> None:
        self._first = pythons_and_numpys()

    def __enter__(self) -> None:
        self._states = pythons_and_numpys()
        _put_back(self._first)

    def __exit__(self, *_: object) -> None:
        _put_back(self._states)


def draw_the_same_again() -> tuple[AbstractContextManager[None], _DrawnAgain]:
    """Return contexts for the two passes of a part that torch's `checkpoint` recomputes.

    It serves as `context_fn`, which is called when the first pass begins. torch replays its own
    random numbers, but not Python's and numpy's.
    """
    return nullcontext(), _DrawnAgain()


def _put_back(states: tuple[Any, Any]) -> None:
    python, numpys = states
    random.setstate(python)
    _numpys_reader.restore(numpys)


class Generators:
    """The state of all random generators."""

    def __init__(self, device: torch.device) -> None:
        self._cpu, self._device = torch.get_rng_state(), device
        self._python, self._numpy = pythons_and_numpys()
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._card = self._module.get_rng_state(device) if self._module else None

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        _put_back((self._python, self._numpy))
        if self._module:
            self._module.set_rng_state(self._card, self._device)

    def state(self) -> list[object]:
        card = self._module.get_rng_state(self._device).cpu() if self._module else None
        return [torch.get_rng_state(), card, *pythons_and_numpys()]


def draw_all(level: float) -> None:
    """Make the next several hundred draws of Python and numpy equal this number in [0, 1)."""
    words = np.full(_NUM_WORDS, _untemper(int(level * 2**32)), dtype=np.uint32)
    random.setstate((random.Random.VERSION, (*words.tolist(), 0), None))
    if type(_numpys_reader.generator) is np.random.MT19937:
        np.random.set_state(("MT19937", words, 0, 0, 0.0))


def _untemper(number: int) -> int:
    """Return the state word from which a Mersenne twister produces this number."""
    number ^= number >> 18
    number ^= (number << 15) & 0xEFC60000
    word = number
    for _ in range(5):
        word = number ^ ((word << 7) & 0x9D2C5680)
    number = word & 0xFFFFFFFF
    word = number
    for _ in range(3):
        word = number ^ (word >> 11)
    return word
