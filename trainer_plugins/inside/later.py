"""Finds out from its code what a program does after a training, and lets it train again."""

import dis
import inspect
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import psutil

_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_GOES_ON_TIMES = 3
"""A program with other trainings to come may run this many times longer than up to the first."""

_OF_A_LIBRARY = ("/site-packages/", "/dist-packages/")


_EVALUATE = {"evaluate": "do_eval", "predict": "do_predict"}
"""Methods, and the argument that switches each off where the code asks for it."""


def find_later_evaluation(frame: FrameType | None, args: object) -> str | None:
    """Return where a function on the stack evaluates or predicts later; None if nowhere.

    A script that names `do_eval` or `do_predict` evaluates only if the argument is true.
    """
    while frame is not None:
        for each in dis.get_instructions(frame.f_code):
            switch = _EVALUATE.get(each.argval) if _is_attribute(each) else None
            if switch is None or each.offset <= frame.f_lasti:
                continue
            if switch not in frame.f_code.co_names or getattr(args, switch):
                return _place(frame, each)
        frame = frame.f_back
    return None


def find_later_training(frame: FrameType | None) -> str | None:
    """Return where a function on the stack may train again; None if nowhere.

    It may call `train` later, repeat a loop, or call a function that trains. A model's `train`
    counts too: the program then continues for a while.
    """
    while frame is not None:
        names = {**frame.f_globals, **vars(type(frame.f_locals.get("self"))), **frame.f_locals}
        for each in dis.get_instructions(frame.f_code):
            if each.offset > frame.f_lasti and _trains(each, frame.f_lasti, names):
                return _place(frame, each)
        frame = frame.f_back
    return None


def _place(frame: FrameType, each: dis.Instruction) -> str:
    place = getattr(each, "positions", None)  # not in Python 3.10
    line = place.lineno if place else ""
    if each.opcode in _JUMPS:
        line = frame.f_lineno  # will run again
    return f"{Path(frame.f_code.co_filename).name}:{line}"


def _is_attribute(each: dis.Instruction) -> bool:
    return each.opname in ("LOAD_ATTR", "LOAD_METHOD")


def _trains(each: dis.Instruction, now: int, names: Mapping[str, Any]) -> bool:
    """Return whether an instruction after the one at `now` leads to another training."""
    if each.opcode in _JUMPS:  # one that has no end is that of an `await`
        return each.argval <= now and each.opname != "JUMP_BACKWARD_NO_INTERRUPT"
    if not each.opname.startswith("LOAD_") or not isinstance(each.argval, str):
        return False
    return (_is_attribute(each) and each.argval == "train") or _calls_train(
        names.get(each.argval), []
    )


def _calls_train(function: object, known: list[object]) -> bool:
    """Return whether a function of the user's own code calls a method `train`, or one that does."""
    function = inspect.unwrap(function) if callable(function) else None
    if not isinstance(function, FunctionType) or function in known:
        return False
    known.append(function)
    code, others = function.__code__, function.__globals__
    if any(folder in code.co_filename for folder in _OF_A_LIBRARY):
        return False
    return "train" in code.co_names or any(
        _calls_train(others.get(name), known) for name in code.co_names
    )


class Waiting:
    """Lets a program continue to its next training, for a limited time in all."""

    def __init__(self) -> None:
        self._end = 0.0  # in seconds since 1970
        self._timer: threading.Timer | None = None

    def begin(self) -> bool:
        """End the program when the time is over; return whether there is time left."""
        now = time.time()
        if not self._end:
            self._end = now + _GOES_ON_TIMES * (now - psutil.Process().create_time())
        if now >= self._end:
            return False
        self._timer = threading.Timer(self._end - now, os._exit, (0,))
        self._timer.daemon = True
        self._timer.start()
        return True

    def interrupt(self, num_ranks: int) -> None:
        """Let a training run to its end; of several ranks none may wait for one that has ended."""
        if self._timer is not None and num_ranks == 1:
            self._timer.cancel()
