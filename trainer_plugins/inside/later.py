"""Finds out from the code of the running functions whether a program will train again."""

import dis
import inspect
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_OF_A_LIBRARY = ("/site-packages/", "/dist-packages/")


def find_later_training(frame: FrameType | None) -> str | None:
    """Return where a function on the stack may train again; None if nowhere.

    It may call `train` later, repeat a loop, or call a function that trains. A model's `train`
    counts too: the program then continues for a while.
    """
    while frame is not None:
        names = {**frame.f_globals, **vars(type(frame.f_locals.get("self"))), **frame.f_locals}
        for each in dis.get_instructions(frame.f_code):
            if each.offset > frame.f_lasti and _trains(each, frame.f_lasti, names):
                place = getattr(each, "positions", None)  # not in Python 3.10
                line = place.lineno if place else ""
                if each.opcode in _JUMPS:
                    line = frame.f_lineno  # will run again
                return f"{Path(frame.f_code.co_filename).name}:{line}"
        frame = frame.f_back
    return None


def _trains(each: dis.Instruction, now: int, names: Mapping[str, Any]) -> bool:
    """Return whether an instruction after the one at `now` leads to another training."""
    if each.opcode in _JUMPS:  # one that has no end is that of an `await`
        return each.argval <= now and each.opname != "JUMP_BACKWARD_NO_INTERRUPT"
    if not each.opname.startswith("LOAD_") or not isinstance(each.argval, str):
        return False
    is_attribute = each.opname in ("LOAD_ATTR", "LOAD_METHOD")
    return (is_attribute and each.argval == "train") or _calls_train(names.get(each.argval), [])


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
