"""Patience: calls a library that may hang, with a time limit."""

import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")

Answer = tuple[object, BaseException | None]
Job = tuple[Callable[[], object], SimpleQueue[Answer]]


class Patience:
    """Runs calls on a separate thread, so that a call that hangs blocks only that thread."""

    # A daemon thread, because an executor's thread would keep Python from ending.

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.seconds = name, seconds
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._pid: int | None = None
        self._pending: SimpleQueue[Answer] | None = None

    def call(self, work: Callable[[], T]) -> T:
        """Return the result of `work`; TimeoutError if it, or an earlier call, takes too long."""
        if self._pid != os.getpid():
            self._jobs, self._pending, self._pid = SimpleQueue(), None, os.getpid()
            threading.Thread(target=_serve, args=(self._jobs,), daemon=True, name=self.name).start()
        if self._pending is not None:
            if self._pending.empty():
                raise TimeoutError("an earlier call has still not returned")
            self._pending = None
        answer: SimpleQueue[Answer] = SimpleQueue()
        self._jobs.put((work, answer))
        try:
            result, error = answer.get(timeout=self.seconds)
        except Empty:
            self._pending = answer
            raise TimeoutError(f"no answer within {self.seconds:.0f} s") from None
        if error is not None:
            raise error
        return result  # type: ignore[return-value]


def _serve(jobs: SimpleQueue[Job]) -> None:
    while True:
        work, answer = jobs.get()
        try:
            answer.put((work(), None))
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            answer.put((None, error))
        del work, answer  # the caller then frees whatever they refer to
