"""Which module made a node of the backward: autograd numbers the nodes of each thread in their order. Imports torch."""

import contextlib
import threading
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import torch


class Graph:
    """Notes where modules begin and end in the numbering of nodes, and finds the module of one that runs."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[list[int], list[str]]] = {}
        self._made_in = threading.get_ident()

    def enter(self, module: str) -> None:
        """From here on nodes are of this module, which may also be the one around a module that has ended."""
        numbers, modules = self._begun.setdefault(threading.get_ident(), ([], []))
        core: Any = torch._C
        numbers.append(core._autograd._get_sequence_nr())
        modules.append(module)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Nodes that run inside were made by this thread; with reentrant checkpointing that is not the main one."""
        before, self._made_in = self._made_in, threading.get_ident()
        try:
            yield
        finally:
            self._made_in = before

    def module_running(self) -> str:
        """The module in whose forward the node was made that is running; empty where none was, or none runs."""
        core: Any = torch._C
        node = core._current_autograd_node()
        if node is None or self._made_in not in self._begun:
            return ""
        numbers, modules = self._begun[self._made_in]
        position = bisect_right(numbers, node._sequence_nr()) - 1
        is_leaf = not node.next_functions  # what adds to a gradient has no number of its own
        return "" if is_leaf or position < 0 else modules[position]
