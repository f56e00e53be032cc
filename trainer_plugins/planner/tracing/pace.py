"""Say where a rehearsal is: its moment, its module, and how many operations that module takes."""

import time

from trainer_plugins.planner import progress
from trainer_plugins.planner.tracing.graph import Graph

_EVERY_SECONDS = 1.0
_MANY = 1000
"""Operations of one call of a module; layers without a loop have tens of them."""


class Pace:
    """Counts operations, and writes down once a second what they belong to."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._num_operations = self._num_before = 0
        self._at, self._next = "", 0.0

    def count(self, moment: str, module: str) -> None:
        """Count an operation of a moment and a module; without one, of that which is running."""
        self._num_operations += 1
        if time.monotonic() < self._next:
            return
        module = module or self._graph.module_running()
        at = f"the {moment}{f' of {module}' if module else ''}"
        if at != self._at:
            self._at, self._num_before = at, self._num_operations
        here = self._num_operations - self._num_before
        loop = f" ({here:,} operations so far: a loop, as over the tokens of a row)"
        progress.inside(f"{at}{loop if here > _MANY else ''}")
        self._next = time.monotonic() + _EVERY_SECONDS
