"""Know where a run is: its module, how far the card has come, and what to show while it runs."""

import contextlib
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from trainer_plugins.planner import progress

_EVERY_SECONDS = 1.0
_MANY_OPERATIONS = 1000  # in one call of a module; layers without a loop have tens


class Graph:
    """Finds the module that made a backward node, by autograd's numbers of each thread."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[list[int], list[str]]] = {}
        self._made_in = threading.get_ident()

    def enter(self, module: str) -> None:
        """Count later nodes for this module, which begins, or goes on after an inner one ended."""
        numbers, modules = self._begun.setdefault(threading.get_ident(), ([], []))
        numbers.append(torch._C._autograd._get_sequence_nr())
        modules.append(module)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Treat nodes that run inside as made by this thread: reentrant checkpointing, too."""
        before, self._made_in = self._made_in, threading.get_ident()
        try:
            yield
        finally:
            self._made_in = before

    def module_running(self) -> str:
        """Return the module whose forward made the running node; empty if there is none."""
        core: Any = torch._C
        node = core._current_autograd_node()
        if node is None or self._made_in not in self._begun:
            return ""
        numbers, modules = self._begun[self._made_in]
        position = bisect_right(numbers, node._sequence_nr()) - 1
        is_leaf = not node.next_functions  # a node that adds to a gradient has no own number
        return "" if is_leaf or position < 0 else modules[position]


class Streams:
    """Knows the current stream: a backward node runs in the one that its forward ran in.

    A node that adds to a gradient has no own number. It runs after a node that uses the weight, in
    the same stream (torch/csrc/autograd/engine.cpp, evaluate_function).
    """

    def __init__(self) -> None:
        self._stream = 0
        self._made: list[tuple[int, int, int]] = []  # the first node and the end, of each stream
        self._node: int | None = None  # which runs

    def current(self) -> int:
        """Return the number of the current stream; the default one is 0."""
        core: Any = torch._C
        node = core._current_autograd_node() if self._made else None
        number = None if node is None else node._sequence_nr()
        if number != self._node and (node is None or node.next_functions):
            self._stream = self._of(node)
        self._node = number
        return self._stream

    def adding(self) -> int:
        """Return the stream in which two gradients are added: that of the node that gets them.

        input_buffer.cpp, add. It is known where the running node passes all that it makes to one.
        """
        core: Any = torch._C
        node = core._current_autograd_node() if self._made else None
        to = {self._of(each) for each, _ in node.next_functions if each} if node else set()
        return to.pop() if len(to) == 1 else self.current()

    def _of(self, node: Any) -> int:
        number = -1 if node is None else node._sequence_nr()
        return next((stream for first, end, stream in self._made if first <= number < end), 0)

    @contextlib.contextmanager
    def using(self, stream: int) -> Iterator[None]:
        """Let a stream be the current one."""
        core: Any = torch._C
        before, first = self.current(), core._autograd._get_sequence_nr()
        self._stream = stream
        try:
            yield
        finally:
            end = core._autograd._get_sequence_nr()
            if stream and end > first:
                self._made.append((first, end, stream))
            self._stream = before


class Lag:
    """Keeps what has to wait for the card, which runs as late as the program lets it.

    Until a program synchronises, nothing is known to be finished, so a plan counts the most memory
    that other streams can still be reading.
    """

    def __init__(self) -> None:
        self._now = 0
        self._waiting: deque[tuple[int, Callable[[], object]]] = deque()

    def mark(self) -> int:
        """Return this place in the program, for `finish`."""
        self._now += 1
        return self._now

    def finish(self, mark: int) -> None:
        """Let the card reach a place in the program."""
        while self._waiting and self._waiting[0][0] <= mark:
            self._waiting.popleft()[1]()

    def later(self, then: Callable[[], object]) -> None:
        """Call a function once the card has certainly reached this place."""
        self._waiting.append((self.mark(), then))


class Pace:
    """Counts operations, and reports once a second which module they belong to."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._num_operations = self._num_before = 0
        self._at, self._next = "", 0.0

    def count(self, moment: str, module: str) -> None:
        """Count an operation; without a module, it is of the one whose backward runs."""
        self._num_operations += 1
        if time.monotonic() < self._next:
            return
        module = module or self._graph.module_running()
        at = f"the {moment}{f' of {module}' if module else ''}"
        if at != self._at:
            self._at, self._num_before = at, self._num_operations
        here = self._num_operations - self._num_before
        loop = f" ({here:,} operations so far: a loop, as over the tokens of a row)"
        progress.inside(f"{at}{loop if here > _MANY_OPERATIONS else ''}")
        self._next = time.monotonic() + _EVERY_SECONDS
