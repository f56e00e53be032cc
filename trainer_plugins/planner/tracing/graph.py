"""Find the module that made a node of the backward graph. Imports torch.

Autograd numbers the nodes of each thread in the order in which they are made.
"""

import contextlib
import threading
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import torch


class Graph:
    """Notes at which node number each module begins, and finds the module of a running node."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[list[int], list[str]]] = {}
        self._made_in = threading.get_ident()

    def enter(self, module: str) -> None:
        """Count later nodes for this module.

        It begins, or it continues after a module inside it has ended.
        """
        numbers, modules = self._begun.setdefault(threading.get_ident(), ([], []))
        numbers.append(torch._C._autograd._get_sequence_nr())
        modules.append(module)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Take nodes that run inside as made by this thread.

        With reentrant checkpointing that is not the main thread.
        """
        before, self._made_in = self._made_in, threading.get_ident()
        try:
            yield
        finally:
            self._made_in = before

    def module_running(self) -> str:
        """Return the module that made the running node in its forward; empty if there is none."""
        core: Any = torch._C
        node = core._current_autograd_node()
        if node is None or self._made_in not in self._begun:
            return ""
        numbers, modules = self._begun[self._made_in]
        position = bisect_right(numbers, node._sequence_nr()) - 1
        is_leaf = not node.next_functions  # a node that adds to a gradient has no own number
        return "" if is_leaf or position < 0 else modules[position]
