"""Walks the frames above a call, and those of the error that Python showed last."""

import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType


def frames_above() -> Iterator[FrameType]:
    """Yield the frames that called the iterating function, nearest first."""
    # Check a frame's code before its variables: reading `f_locals` keeps the variables alive.
    frame = sys._getframe(1).f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def code_of(function: Callable[..., object]) -> CodeType | None:
    """Return the code of a function without its wrappers."""
    return getattr(inspect.unwrap(function), "__code__", None)


def is_running(function: Callable[..., object]) -> bool:
    """Return whether this thread's stack has a call of this function; about 2 microseconds."""
    code = code_of(function)
    return any(frame.f_code is code for frame in frames_above())


def find_last_errors() -> Iterator[BaseException]:
    """Yield the last error that the interpreter showed, and its causes."""
    error: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def is_of_project(code: object) -> bool:
    """Return whether a class or function belongs neither to an installed package nor to Python."""
    named = getattr(code, "__module__", None)
    name = named if isinstance(named, str) else "builtins"
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    is_installed = "site-packages" in file or "dist-packages" in file
    root = name.partition(".")[0]
    return not is_installed and root not in {*sys.stdlib_module_names, "trainer_plugins"}
