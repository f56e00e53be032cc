"""Climbs the stack, because callbacks get neither their Trainer nor its list of callbacks."""

import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType


def frames_above() -> Iterator[FrameType]:
    """Yield the frames that called the function which iterates over this, nearest first."""
    # Check a frame's code before its variables: reading `f_locals` keeps the variables alive.
    frame = sys._getframe(1).f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def code_of(function: Callable[..., object]) -> CodeType | None:
    """Return the code of a function without its wrappers."""
    return getattr(inspect.unwrap(function), "__code__", None)


def is_running(function: Callable[..., object]) -> bool:
    """Return whether a call of this function is on this thread's stack; about 2 microseconds."""
    code = code_of(function)
    return any(frame.f_code is code for frame in frames_above())
