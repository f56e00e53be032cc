"""Replace attributes for the time of a rehearsal. Imports torch."""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch


class Patches:
    """Replaces attributes, and restores them in reverse order."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.missing: list[str] = []
        """Functions that this version does not have, and which therefore were not wrapped."""

    def set(self, owner: object, name: str, value: object) -> None:
        self._stack.enter_context(patch.object(owner, name, value, create=True))

    def put(self, mapping: dict[Any, Any], key: object, value: object) -> None:
        """Replace one entry. The others are left alone, also those that are made meanwhile."""
        if key in mapping:
            self._stack.callback(mapping.__setitem__, key, mapping[key])
        else:
            self._stack.callback(mapping.pop, key, None)
        mapping[key] = value

    def wrap(self, owner: object, name: str, wrapper: Callable[..., object]) -> None:
        """Replace a function by `wrapper(original, *args, **kwargs)`; note it if it is missing."""
        original = getattr(owner, name, None)
        if original is None:
            self.missing.append(f"{getattr(owner, '__name__', owner)}.{name}")
        else:
            self.set(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))

    def implement(self, operation: str, key: str, function: Callable[..., torch.Tensor]) -> None:
        """Replace an operation of aten for one dispatch key."""
        library = self._stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        library.impl(operation, function, key)

    def close(self) -> None:
        self._stack.close()
