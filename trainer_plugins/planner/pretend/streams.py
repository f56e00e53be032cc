"""Streams of a card that is not there: in whose pool memory is taken. Imports torch.

A block that is freed goes back to the pool of the stream it was taken on, and can be had there at
once. That is what CUDA's allocator does as long as nobody calls `record_stream`, and neither FSDP2
nor DDP does: they order streams by events, and hold what another stream still reads. When such an
event comes, which a real card decides, is the order of the program here.
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from trainer_plugins.planner.tracing.trace import Tracker


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> "_Event":
        return self

    def wait(self, *_: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def answers(tracker: Tracker) -> dict[str, Any]:
    """What `torch.cuda` is asked about streams, by name."""
    numbers = itertools.count(1)

    class Stream:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.number = next(numbers)

        def wait_stream(self, _: Any) -> None:
            pass

        wait_event = wait_stream

        def record_event(self, event: Any = None) -> Any:
            return event if event is not None else _Event()

        def synchronize(self) -> None:
            pass

        def query(self) -> bool:
            return True

        def is_capturing(self) -> bool:
            return False

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.number == self.number

        def __hash__(self) -> int:
            return hash(self.number)

    def current(*_: Any) -> Stream:
        stream = Stream.__new__(Stream)
        stream.number = tracker.stream
        return stream

    @contextlib.contextmanager
    def use(stream: Any) -> Iterator[None]:
        before = tracker.stream
        tracker.stream = stream.number if stream is not None else before
        try:
            yield
        finally:
            tracker.stream = before

    return {
        "Stream": Stream,
        "Event": _Event,
        "current_stream": current,
        "stream": use,
    }
