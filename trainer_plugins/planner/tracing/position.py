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
    """Knows the current stream; the default one is 0.

    On CUDA a backward node runs in the stream that its forward ran in (torch/csrc/autograd/
    engine.cpp, evaluate_function). Here those do that `keep` got; others run in the default one.
    """

    def __init__(self) -> None:
        self._used: list[tuple[int, int | None]] = []  # streams, and the node they are used in
        self._are_kept = False

    def current(self) -> int:
        """Return the number of the current stream."""
        node = self._node()
        if self._used and self._used[-1][1] == _number(node):
            return self._used[-1][0]
        return _stream_of(node)

    def adding(self) -> int:
        """Return the stream in which two gradients are added: that of the node that gets them.

        input_buffer.cpp, add. It is known where the running node passes all that it makes to one.
        """
        node = self._node()
        to = {_stream_of(each) for each, _ in node.next_functions if each} if node else set()
        return to.pop() if len(to) == 1 else self.current()

    def keep(self, node: Any) -> None:
        """Let a node, and those before it, run in the current stream."""
        self._are_kept = True
        if node is not None and "stream" not in node.metadata:
            node.metadata["stream"] = self.current()
            for each, _ in node.next_functions:
                self.keep(each)

    @contextlib.contextmanager
    def using(self, stream: int) -> Iterator[None]:
        """Let a stream be the current one."""
        self._used.append((stream, _number(self._node())))
        try:
            yield
        finally:
            self._used.pop()

    def _node(self) -> Any:
        core: Any = torch._C
        return core._current_autograd_node() if self._are_kept else None


def _number(node: Any) -> int | None:
    return None if node is None else int(node._sequence_nr())


def _stream_of(node: Any) -> int:
    return 0 if node is None else int(node.metadata.get("stream", 0))


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
