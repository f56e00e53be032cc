"""Replace attributes of modules, classes and objects for a while, and restore them."""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

_ABSENT = object()

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Patch:
    owner: object
    name: str
    before: object  # what the owner itself had; `_ABSENT` if it had nothing, or inherited it
    ours: object
    is_restored: bool = False


class Patches(contextlib.ExitStack):
    """Replaces attributes until `close`; with `keeps_later`, what others put over ours stays."""

    def __init__(self, *, keeps_later: bool = False) -> None:
        super().__init__()
        self._keeps_later = keeps_later
        self._patches: list[_Patch] = []
        self.missing: list[str] = []  # functions that `wrap` did not find in the installed versions

    def set(self, owner: object, name: str, value: object) -> None:
        patch = _Patch(owner, name, vars(owner).get(name, _ABSENT), value)
        setattr(owner, name, value)
        self._patches.append(patch)
        self.callback(self._restore, patch)

    def wrap(self, owner: object, name: str, wrapper: Callable[..., object]) -> None:
        """Replace a function by `wrapper(original, *args, **kwargs)`; note it if it is missing."""
        original = getattr(owner, name, None)
        if original is None:
            self.missing.append(f"{getattr(owner, '__name__', owner)}.{name}")
        else:
            self.set(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))

    def restore(self, owner: object) -> None:
        """Restore the attributes of one owner now, the latest first."""
        for patch in reversed(self._patches):
            if patch.owner is owner:
                self._restore(patch)

    def _restore(self, patch: _Patch) -> None:
        if patch.is_restored:
            return
        patch.is_restored = True
        now = vars(patch.owner).get(patch.name, _ABSENT)
        if self._keeps_later and now is not patch.ours:
            logger.warning(
                "%s was replaced again later: that replacement stays, and ours has no effect",
                patch.name,
            )
        elif patch.before is _ABSENT:
            delattr(patch.owner, patch.name)
        else:
            setattr(patch.owner, patch.name, patch.before)
