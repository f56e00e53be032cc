"""Simulate the streams of a card, which decide from whose pool memory is taken. Imports torch.

A freed block goes back to the pool of its stream, and can be reused there at once. After
`record_stream` it waits for another stream, as far as the program lets that lag (`tracing.lag`).
FSDP2 and DDP do not call it: they order streams by events, and hold what another stream reads.
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from trainer_plugins.planner.tracing.lag import Lag
from trainer_plugins.planner.tracing.trace import Tracker


def _events_of(lag: Lag) -> type:
    """Return the class of events of a card."""

    class Event:
        def __init__(self, *_: object, **__: object) -> None:
            self.mark = 0

        def record(self, *_: object) -> "Event":
            self.mark = lag.mark()
            return self

        def wait(self, *_: object) -> None:
            pass

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            lag.finish(self.mark)

    return Event


def answers(tracker: Tracker) -> dict[str, object]:
    """Return what stands in for the names of `torch.cuda` that are about streams."""
    numbers, lag, event_class = itertools.count(1), tracker.lag, _events_of(tracker.lag)

    class Stream:
        def __init__(self, *_: object, **__: object) -> None:
            self.number = next(numbers)

        def wait_stream(self, _: object) -> None:
            pass

        wait_event = wait_stream

        def record_event(self, event: Any = None) -> Any:
            return (event_class() if event is None else event).record()

        def synchronize(self) -> None:
            lag.finish(lag.mark())

        def query(self) -> bool:
            return True

        def is_capturing(self) -> bool:
            return False

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.number == self.number

        def __hash__(self) -> int:
            return hash(self.number)

    def current(*_: object) -> Stream:
        stream = Stream.__new__(Stream)
        stream.number = tracker.stream
        return stream

    @contextlib.contextmanager
    def use(stream: Stream | None) -> Iterator[None]:
        before = tracker.stream
        tracker.stream = stream.number if stream is not None else before
        try:
            yield
        finally:
            tracker.stream = before

    return {
        "Stream": Stream,
        "Event": event_class,
        "current_stream": current,
        "stream": use,
        "synchronize": lambda device=None: lag.finish(lag.mark()),
    }
