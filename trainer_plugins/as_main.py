"""Run a script or a module as `python` would, inside a running Python."""

import runpy
import sys
import types
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path


class NoSuchProgramError(ValueError):
    """No such script or module; errors raised by the program itself are of other types."""


def program(command: list[str], is_module: bool) -> Callable[[], None]:
    """Find a script or a module, and return a function that runs it as plain python would."""
    return _module(command) if is_module else _script(command)


def _script(command: list[str]) -> Callable[[], None]:
    path = command[0]
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise NoSuchProgramError(f"cannot open {path}: {error.strerror}") from error

    def run() -> None:
        sys.argv = command
        _put_first_on_path(str(Path(path).resolve().parent))
        # Its own module named __main__, which stays: pickling, and the script's own threads and
        # exit handlers, look there for its classes.
        module = types.ModuleType("__main__")
        module.__file__ = path
        module.__builtins__ = __builtins__  # type: ignore[attr-defined]
        sys.modules["__main__"] = module
        exec(compile(source, path, "exec"), module.__dict__)

    return run


def _module(command: list[str]) -> Callable[[], None]:
    name = command[0]
    _put_first_on_path(str(Path.cwd()))
    try:
        found = find_spec(name)
    except ModuleNotFoundError as error:
        if not error.name or not f"{name}.".startswith(f"{error.name}."):
            raise  # one of its packages exists, but lacks something else
        found = None
    if found is None:
        raise NoSuchProgramError(f"there is no module {name} here")

    def run() -> None:
        sys.argv = command  # runpy replaces the name by the module's path, as python -m does
        runpy.run_module(name, run_name="__main__", alter_sys=True)

    return run


def _put_first_on_path(folder: str) -> None:
    # Under python -P there is no such entry.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder
