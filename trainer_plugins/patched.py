"""Replace attributes of modules, classes and objects for a while, and restore them."""

import contextlib
import functools
import logging
from collections.abc import Callable

_ABSENT = object()

logger = logging.getLogger(__name__)


class Patches(contextlib.ExitStack):
    """Replaces attributes until `close`; with `keeps_later`, later patches by others stay."""

    def __init__(self, *, keeps_later: bool = False) -> None:
        super().__init__()
        self._keeps_later = keeps_later

    def set(self, owner: object, name: str, value: object) -> None:
        before = vars(owner).get(name, _ABSENT)  # absent too if the owner inherits it
        setattr(owner, name, value)
        self.callback(self._restore, owner, name, before, value)

    def wrap(self, owner: object, name: str, wrapper: Callable[..., object]) -> None:
        """Replace a function by `wrapper(original, *args, **kwargs)`, if this version has it."""
        if (original := getattr(owner, name, None)) is None:
            return

        @functools.wraps(original)
        def call_wrapper(*args: object, **kwargs: object) -> object:
            return wrapper(original, *args, **kwargs)

        self.set(owner, name, call_wrapper)

    def _restore(self, owner: object, name: str, before: object, ours: object) -> None:
        if self._keeps_later and vars(owner).get(name, _ABSENT) is not ours:
            logger.warning(
                "%s was replaced again later: that replacement stays, and ours has no effect", name
            )
        elif before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
