"""Predict the trace of a run with many layers from runs with few.

The traces of n and n + p layers must predict that of n + 2p, event by event and byte by byte. In
longer ones, stretches are inserted that repeat what is before them. The result is replayed like any
trace, since reserved memory is not linear in anything.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, takewhile
from typing import NamedTuple, TypeAlias

from trainer_plugins.planner.plan import Category, Moment
from trainer_plugins.planner.tracing.events import ALLOC, FREE, LEFT, Event, Storage, Trace

_FAR = 100  # a reading of a difference is certain if this many events after it agree

# stream, moment, operation, category and dtype of a storage
_Born: TypeAlias = tuple[int, Moment, str, Category, str]


class _Step(NamedTuple):
    """Describes an event without numbers: a freed storage by its place among those like it."""

    kind: int
    moment: Moment
    born: "_Born | None"  # what is known of the storage; None if the event has none
    place: int  # the place of a freed storage among those like it: 0 is the newest, -1 the oldest
    num_bytes: int


class _Part(NamedTuple):
    """Describes a step that both traces have, or a stretch that only the longer one has."""

    before: _Step | None  # the step in the shorter trace; None for a stretch
    steps: Sequence[_Step]


def longer(traces: Sequence[Trace], num_more: int) -> Trace | None:
    """Extrapolate the trace of a run with more layers; return None if it does not repeat.

    The traces are of n, n + p and, as a proof, n + 2p layers; `num_more` is how often p is added to
    n.
    """
    if any(event.kind == LEFT for trace in traces for event in trace.events):
        return None
    short, middle, *proofs = ([*_steps(trace)] for trace in traces)
    parts = _aligned(short, middle)
    if parts is None or any([*_repeated(parts, 2)] != proof for proof in proofs):
        return None
    if len({frozenset(trace.host_peaks) for trace in traces}) > 1:
        return None
    host_peaks: dict[Moment, int] = {}
    # each moment by itself: with more layers, another one may be the highest
    for moment in traces[0].host_peaks:
        peak = continued([trace.host_peaks[moment] for trace in traces], num_more)
        if peak is None:
            return None
        host_peaks[moment] = peak
    return _trace_of(_repeated(parts, num_more), host_peaks)


def without_passing(trace: Trace) -> Trace:
    """Leave out sharding buffers that are gone before anything else is made.

    DDP sends its weights in such buffers as it begins, at most 250 MB each: they span layers.
    """
    born: dict[int, int] = {}
    passing: set[int] = set()
    others = 0  # events of other storages so far
    for event in trace.events:
        is_buffer = event.number >= 0 and (
            trace.storages[event.number].category == "sharding buffers"
        )
        others += not is_buffer
        if is_buffer and event.kind == ALLOC:
            born[event.number] = others
        elif event.kind == FREE and born.get(event.number) == others:
            passing.add(event.number)
    return replace(
        trace, events=tuple(event for event in trace.events if event.number not in passing)
    )


def continued(numbers: Sequence[int], num_more: int) -> int | None:
    """Continue numbers by `num_more` steps from the first; None if they grow unevenly."""
    first, *others = numbers
    grows = others[0] - first
    if any(number != first + times * grows for times, number in enumerate(others, 1)):
        return None
    return first + num_more * grows


def _steps(trace: Trace) -> Iterator[_Step]:
    alive: dict[tuple[_Born, int], list[int]] = defaultdict(list)
    for event in _in_one_order(trace):
        if event.kind not in (ALLOC, FREE):
            yield _Step(event.kind, event.moment, None, 0, 0)
            continue
        storage = trace.storages[event.number]
        born = (storage.stream, storage.moment, storage.operation, storage.category, storage.dtype)
        others = alive[born, storage.num_bytes]
        place = 0
        if event.kind == ALLOC:
            others.append(event.number)
        else:
            oldest = others.index(event.number)
            newest = len(others) - 1 - oldest
            place = newest if newest <= oldest else -1 - oldest
            del others[oldest]
        yield _Step(event.kind, event.moment, born, place, storage.num_bytes)


def _in_one_order(trace: Trace) -> Iterator[Event]:
    """Put copies of weights that are freed together in the order in which they were made.

    Autocast drops its copies in the order of a hash map (aten's autocast_mode.cpp, clear_cache).
    """
    for is_copy, group in groupby(trace.events, lambda event: _is_freed_copy(trace, event)):
        events = [*group]
        yield from sorted(events, key=lambda event: event.number) if is_copy else events


def _is_freed_copy(trace: Trace, event: Event) -> bool:
    return event.kind == FREE and (
        trace.storages[event.number].category == "autocast copies of weights"
    )


def _aligned(short: Sequence[_Step], middle: Sequence[_Step]) -> list[_Part] | None:
    """Find the stretches that only the longer trace has, each of which repeats what is before it.

    Of several readings that one counts after which the traces agree for longest.
    """
    parts: list[_Part] = []
    at, to = 0, 0
    while to < len(middle):
        if at < len(short) and short[at] == middle[to]:
            length = 0
        else:
            lengths = _readings(short, at, middle, to)
            if not lengths:
                return None
            length = max(
                lengths,
                key=lambda each: _agreement(short, at + (each == 0), middle, to + (each or 1)),
            )
        if length:
            parts.append(_Part(None, middle[to : to + length]))
        else:
            parts.append(_Part(short[at], middle[to : to + 1]))
        at, to = at + (length == 0), to + (length or 1)
    return parts if at == len(short) else None


def _readings(short: Sequence[_Step], at: int, middle: Sequence[_Step], to: int) -> list[int]:
    """Return the possible lengths of an inserted stretch that repeats the events before it.

    0 stands for one event of another size: an optimizer stacks a norm for each parameter.
    """
    other_size = at < len(short) and short[at][:4] == middle[to][:4]
    spare = len(middle) - to - (len(short) - at)
    return [0] * other_size + [
        length
        for length in range(1, min(spare, to) + 1)
        if middle[to : to + length] == middle[to - length : to]
    ]


def _agreement(short: Sequence[_Step], at: int, middle: Sequence[_Step], to: int) -> int:
    if len(short) - at == len(middle) - to and short[at:] == middle[to:]:
        return _FAR  # to the end
    pairs = zip(short[at : at + _FAR], middle[to : to + _FAR], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _repeated(parts: Sequence[_Part], times: int) -> Iterator[_Step]:
    for part in parts:
        if part.before is None:
            for _ in range(times):
                yield from part.steps
        else:
            (step,) = part.steps
            grown = part.before.num_bytes + times * (step.num_bytes - part.before.num_bytes)
            yield step if grown == step.num_bytes else step._replace(num_bytes=grown)


def _trace_of(steps: Iterator[_Step], host_peaks: Mapping[Moment, int]) -> Trace | None:
    storages: list[Storage] = []
    events: list[Event] = []
    alive: dict[tuple[_Born, int], list[int]] = defaultdict(list)
    for step in steps:
        number = -1
        if step.born is not None:
            others = alive[step.born, step.num_bytes]
            if step.kind == ALLOC:
                stream, moment, operation, category, dtype = step.born
                number = len(storages)
                storages.append(
                    Storage(step.num_bytes, stream, moment, operation, "", category, (), dtype)
                )
                others.append(number)
            else:
                index = len(others) - 1 - step.place if step.place >= 0 else -1 - step.place
                if not 0 <= index < len(others):
                    return None
                number = others.pop(index)
        events.append(Event(step.kind, number, step.moment))
    return Trace(tuple(storages), tuple(events), host_peaks)
