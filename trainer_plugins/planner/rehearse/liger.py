"""Find Liger's patches in the user's process, and apply them in the plan's process."""

import functools
import importlib
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from trainer_plugins.planner.request import Replaced

_PATCHED = ("transformers.", "torch.nn.functional")


def find_replaced_by_liger() -> tuple[Replaced, ...]:
    """Return everything that Liger has patched in this process."""
    if "liger_kernel" not in sys.modules:
        return ()
    names = [name for name in sys.modules if name.startswith(_PATCHED)]
    return tuple(each for name in names for each in _search_module(name))


def replace_again(replaced: tuple[Replaced, ...]) -> None:
    """Apply the same patches in this process, permanently."""
    for module, path, (home, qualified) in replaced:
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        instead: Any = importlib.import_module(home)
        setattr(owner, name, functools.reduce(getattr, qualified.split("."), instead))


def _search_module(module: str) -> Iterator[Replaced]:
    for name, value in list(vars(sys.modules[module]).items()):
        if _is_ligers(value):
            yield Replaced(module, name, (value.__module__, value.__qualname__))
        elif isinstance(value, type) and value.__module__ == module:
            for inner, method in vars(value).items():
                if _is_ligers(method):
                    instead = (method.__module__, method.__qualname__)
                    yield Replaced(module, f"{name}.{inner}", instead)


def _is_ligers(value: object) -> bool:
    return isinstance(value, (FunctionType, type)) and value.__module__.startswith("liger_kernel.")
