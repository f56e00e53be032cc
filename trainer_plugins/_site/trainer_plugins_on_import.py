"""Calls a function once a module has been imported; `exec` makes this a top-level module."""

import sys

TYPE_CHECKING = False  # importing typing would take longer than everything else here
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    Function = TypeVar("Function", bound="Callable[..., Any]")


def call_when_imported(name: str, then: "Callable[[], None]") -> None:
    """Call `then()` directly after the module of this name is imported for the first time."""
    sys.meta_path.insert(0, _Finder(name, then))


def hide_from_warnings(wrapper: "Function") -> "Function":
    """Have `warnings` skip a wrapper's frame, so that a `stacklevel` finds the same line."""
    # By its file name: `_is_internal_frame` in Lib/warnings.py of Python 3.6 to 3.14.
    code = wrapper.__code__
    if hasattr(code, "replace"):  # since Python 3.8
        wrapper.__code__ = code.replace(co_filename=code.co_filename + " (as importlib._bootstrap)")
    return wrapper


class _Finder:  # finds one module as the other finders would, and has its loader call back
    def __init__(self, name: str, then: "Callable[[], None]") -> None:
        self.name, self.then = name, then
        self._is_asking = False

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name != self.name or self._is_asking:  # another of these asks, for the same module
            return None
        from importlib.util import find_spec

        self._is_asking = True
        try:
            spec = find_spec(name)  # as the other finders would
        finally:
            self._is_asking = False
        if spec is not None:
            self._have_called_back(spec.loader)
        return spec

    def _have_called_back(self, loader: "Any") -> None:
        execute = loader.exec_module

        def exec_module(module: "Any") -> None:
            execute(module)
            # Only now: a module may be searched for, or fail, without being imported.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.then()

        # Of this one loader, which keeps its class and all its abilities.
        loader.exec_module = hide_from_warnings(exec_module)
