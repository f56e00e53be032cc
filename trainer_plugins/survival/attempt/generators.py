"""Generators: detects and restores the random numbers that a pass draws."""

import pickle
import random
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

_NUM_WORDS = 624  # state of a Mersenne twister, as 32-bit words


def pythons_and_numpys() -> tuple[object, bytes]:
    """Return the states of Python's and numpy's generators, which are equal until a draw."""
    return random.getstate(), pickle.dumps(np.random.get_state(legacy=False))


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
    np.random.set_state(pickle.loads(numpys))


class Generators:
    """The states of all random generators at one moment."""

    def __init__(self, device: torch.device) -> None:
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._device = device
        card = self._module.get_rng_state(device) if self._module else None
        self.states = (torch.get_rng_state(), card, pythons_and_numpys())

    def restore(self) -> None:
        cpu, card, others = self.states
        torch.set_rng_state(cpu)
        _put_back(others)
        if self._module:
            self._module.set_rng_state(card, self._device)


def draw_all(word: int) -> None:
    """Make the next several hundred draws of Python and numpy equal.

    `word` is the state of a Mersenne twister from which it draws that number.
    """
    words = np.full(_NUM_WORDS, word, dtype=np.uint32)
    random.setstate((random.Random.VERSION, (*words.tolist(), 0), None))
    numpys: Any = np.random
    if type(numpys.get_bit_generator()) is np.random.MT19937:
        np.random.set_state(("MT19937", words, 0, 0, 0.0))
