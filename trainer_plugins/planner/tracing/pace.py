"""Say where a rehearsal is: its moment, its module, and how many operations that module takes."""

import time
from collections.abc import Callable

from trainer_plugins.planner import progress

_EVERY_SECONDS = 1.0
_MANY = 1000
"""Operations of one call of a module; layers without a loop have tens of them."""


class Pace:
    """Counts operations, and writes down once a second what they belong to."""

    def __init__(self) -> None:
        self._num_operations = self._num_before = 0
        self._at, self._next = "", 0.0

    def count(self, where: Callable[[], str]) -> None:
        """Count an operation; `where` says to what it belongs, as in "forward of lm_head"."""
        self._num_operations += 1
        if time.monotonic() < self._next:
            return
        at = where()
        if at != self._at:
            self._at, self._num_before = at, self._num_operations
        here = self._num_operations - self._num_before
        loop = f" ({here:,} operations so far: a loop, as over the tokens of a row)"
        progress.inside(f"{at}{loop if here > _MANY else ''}")
        self._next = time.monotonic() + _EVERY_SECONDS
