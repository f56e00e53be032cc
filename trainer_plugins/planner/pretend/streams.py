"""Simulate the streams of a card, which decide from whose pool memory is taken. Imports torch.

A freed block goes back to the pool of its stream, and can be reused there at once. CUDA's allocator
does that unless `record_stream` is called. Neither FSDP2 nor DDP call it: they order streams by
events, and hold tensors that another stream still reads. On a real card the card decides when such
an event comes; here it comes in the order of the program.
"""

import contextlib
import itertools
from collections.abc import Iterator

from trainer_plugins.planner.tracing.trace import Tracker


class _Event:
    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record(self, *_: object) -> "_Event":
        return self

    def wait(self, *_: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def answers(tracker: Tracker) -> dict[str, object]:
    """Return what stands in for the names of `torch.cuda` that are about streams."""
    numbers = itertools.count(1)

    class Stream:
        def __init__(self, *_: object, **__: object) -> None:
            self.number = next(numbers)

        def wait_stream(self, _: object) -> None:
            pass

        wait_event = wait_stream

        def record_event(self, event: object = None) -> object:
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
        "Event": _Event,
        "current_stream": current,
        "stream": use,
    }
