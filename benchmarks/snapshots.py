"""Reads what a card's allocator did from a memory snapshot of torch; sizes in bytes.

`torch.cuda.memory._dump_snapshot` writes the segments as they are at its end, and the last events
before. `read` undoes the events, which gives the segments as they were at the first one. What it
keeps of a file are actions, addresses, sizes and streams: no frame, no name. This keeps a trace,
and names where it comes from:

    python -m benchmarks.snapshots SNAPSHOT OWNER/REPOSITORY@COMMIT:PATH KEPT.json.gz
"""

import gzip
import json
import pickle
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trainer_plugins.allocator.model import AllocatorModel
from trainer_plugins.allocator.model_rules import LARGE_SEGMENT_BYTES
from trainer_plugins.units import MIB

_SMALL_SEGMENT_BYTES = 2 * MIB
_STEP = 512  # each address is a multiple of it

Action = Literal["alloc", "free", "segment_alloc", "segment_free", "oom"]
_ACTIONS: Mapping[str, Action] = {
    "alloc": "alloc",
    "free_completed": "free",
    "segment_alloc": "segment_alloc",
    "segment_map": "segment_alloc",
    "segment_free": "segment_free",
    "segment_unmap": "segment_free",
    "oom": "oom",
}
_LETTERS: Mapping[Action, str] = {
    "alloc": "a",
    "free": "f",
    "segment_alloc": "+",
    "segment_free": "-",
    "oom": "o",
}

State = Literal["used", "free", "unmapped"]


class Event(NamedTuple):
    """Holds one thing that the allocator did; memory that was mapped is a segment too."""

    action: Action
    address: int
    """In an `oom` the bytes that the card had left."""

    num_bytes: int
    stream: int


class Segment(NamedTuple):
    """Holds a segment, or a range of addresses with pages mapped into it, at the first event."""

    address: int
    stream: int
    is_small: bool
    pieces: tuple[tuple[State, int], ...]
    """What lies in it, without a hole: state and bytes."""


@dataclass(frozen=True)
class Trace:
    """Holds the events of one card, and its segments at the first of them."""

    source: str
    """The repository, the commit and the path, or the file."""

    expandable: bool
    segments: tuple[Segment, ...]
    events: tuple[Event, ...]


class NotReadableError(Exception):
    """Says in one line why a snapshot cannot be replayed."""


class _NoClasses(pickle.Unpickler):
    """Reads values only: no snapshot needs a class, and a pickle that names one may run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise NotReadableError(f"it names {module}.{name}; a snapshot holds plain values only")


def read(path: Path) -> list[Trace]:
    """Read a snapshot, or what `write` has kept of one: a trace for each card with events.

    Raises:
        NotReadableError: it is not a snapshot, or holds what is not modelled.
    """
    if path.name.endswith(".json.gz"):
        return [_kept(path)]
    try:
        with path.open("rb") as file:
            snapshot = _NoClasses(file).load()
    except (OSError, EOFError, pickle.UnpicklingError, ValueError) as error:
        raise NotReadableError(f"it cannot be read: {error}") from error
    if not isinstance(snapshot, dict) or "device_traces" not in snapshot:
        raise NotReadableError("it has no events: recording was not on when it was dumped")
    cards = enumerate(snapshot["device_traces"])
    found = [_trace(snapshot, card, path.name) for card, events in cards if events]
    if not found:
        raise NotReadableError("it has no events: recording was not on when it was dumped")
    return found


def write(trace: Trace, path: Path) -> None:
    """Keep a trace as a small file."""
    events = trace.events
    kept = {
        "source": trace.source,
        "expandable": trace.expandable,
        "segments": [[*segment[:3], segment.pieces] for segment in trace.segments],
        "actions": "".join(_LETTERS[event.action] for event in events),
        # A difference to the event before takes fewer digits than an address.
        "addresses": [
            (after.address - before.address) // _STEP for before, after in _pairs(events)
        ],
        "sizes": [event.num_bytes for event in events],
        "streams": [event.stream for event in events] if any(e.stream for e in events) else [],
    }
    text = json.dumps(kept, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def _kept(path: Path) -> Trace:
    kept = json.loads(gzip.decompress(path.read_bytes()))
    actions = {letter: action for action, letter in _LETTERS.items()}
    streams = kept["streams"] or [0] * len(kept["sizes"])
    events, address = [], 0
    for letter, step, size, stream in zip(
        kept["actions"], kept["addresses"], kept["sizes"], streams, strict=True
    ):
        address += step * _STEP
        events.append(Event(actions[letter], address, size, stream))
    segments = [
        Segment(address, stream, is_small, tuple((state, size) for state, size in pieces))
        for address, stream, is_small, pieces in kept["segments"]
    ]
    return Trace(kept["source"], kept["expandable"], tuple(segments), tuple(events))


def _pairs(events: Sequence[Event]) -> Iterator[tuple[Event, Event]]:
    return pairwise([Event("alloc", 0, 0, 0), *events])


def _trace(snapshot: Mapping[str, Any], card: int, source: str) -> Trace:
    segments = [each for each in snapshot["segments"] if each["device"] == card]
    raw = snapshot["device_traces"][card]
    if any(tuple(each.get("segment_pool_id", (0, 0))) != (0, 0) for each in segments):
        raise NotReadableError("it has private pools (of CUDA graphs), which are not modelled")
    kinds = {bool(each.get("is_expandable")) for each in segments}
    kinds |= {each["action"][8:] in ("map", "unmap") for each in raw if "segment" in each["action"]}
    if len(kinds) > 1:
        raise NotReadableError("some of its segments are expandable and others not")
    events = tuple(
        Event(
            _ACTIONS[event["action"]],
            event["device_free"] if event["action"] == "oom" else event["addr"],
            event["size"],
            event["stream"],
        )
        for event in raw
        if event["action"] in _ACTIONS
    )
    start = _Start(segments, events, expandable=kinds == {True})
    return Trace(source, kinds == {True}, tuple(start.segments()), events)


class _Start:
    """Finds what was there at the first event."""

    def __init__(
        self, segments: Sequence[Mapping[str, Any]], events: Sequence[Event], *, expandable: bool
    ) -> None:
        self._expandable = expandable
        self._events = events
        self._live: dict[int, int | None] = {}  # sizes of blocks; None if only the request is known
        self._requested: dict[int, int] = {}
        self._taken: dict[int, tuple[int, int, bool]] = {}  # segments: bytes, stream, small
        self._mapped: list[tuple[int, int]] = []  # low and high address
        self._ranges: dict[int, tuple[int, bool]] = {}  # stream and small, by some address
        for segment in segments:
            self._at_end(segment)
        for event in reversed(events):
            self._undo(event)

    def _at_end(self, segment: Mapping[str, Any]) -> None:
        start, size = segment["address"], segment["total_size"]
        is_small = segment["segment_type"] == "small"
        if self._expandable:
            self._mapped.append((start, start + size))
            self._ranges[start] = (segment["stream"], is_small)
        else:
            self._taken[start] = (size, segment["stream"], is_small)
        position = start
        for block in segment["blocks"]:
            address = block.get("address", position)  # torch 2.0 writes none
            position = address + block["size"]
            if block["state"].startswith("active"):
                self._live[address] = block["size"]

    def _undo(self, event: Event) -> None:
        address, size = event.address, event.num_bytes
        if event.action == "alloc":
            self._live.pop(address, None)
        elif event.action == "free":
            self._live[address], self._requested[address] = None, size
        elif event.action == "segment_alloc" and self._expandable:
            self._mapped = list(_without(self._mapped, address, address + size))
            self._ranges.setdefault(address, (event.stream, size % LARGE_SEGMENT_BYTES > 0))
        elif event.action == "segment_alloc":
            self._taken.pop(address, None)
        elif event.action == "segment_free" and self._expandable:
            self._mapped.append((address, address + size))
        elif event.action == "segment_free":
            self._taken[address] = (size, event.stream, size == _SMALL_SEGMENT_BYTES)

    def segments(self) -> Iterator[Segment]:
        """Return the segments, the lowest first."""
        if self._expandable:
            yield from self._of_ranges()
            return
        addresses = sorted(self._live)
        behind = self._first_behind(addresses)
        for start, (size, stream, is_small) in sorted(self._taken.items()):
            inside = _within(addresses, start, start + size)
            pieces = self._pieces(inside, start, start + size, None if is_small else behind)
            yield Segment(start, stream, is_small, tuple(pieces))

    def _first_behind(self, addresses: list[int]) -> dict[int, int]:
        """Return where the first allocation behind a live block lies, in its segment."""
        found: dict[int, int] = {}
        gone: set[int] = set()
        starts = sorted(self._taken)
        for event in self._events:
            if event.action == "free":
                gone.add(event.address)
            if event.action != "alloc" or event.address in self._live:
                continue
            index = bisect_right(addresses, event.address) - 1
            segment = bisect_right(starts, event.address) - 1
            if index < 0 or segment < 0 or addresses[index] < starts[segment]:
                continue
            if addresses[index] not in gone:
                found.setdefault(addresses[index], event.address)
        return found

    def _pieces(
        self, inside: list[int], start: int, end: int, behind: Mapping[int, int] | None
    ) -> Iterator[tuple[State, int]]:
        """Cut a range into its blocks.

        The size of a block that was freed within the trace is not in the file. In the small pool
        and in expandable segments it is that of its request. In the large pool what is left of a
        block is only cut off if it is more than 1 MiB: a shorter rest belongs to the block.
        """
        position = start
        for address, following in pairwise([*inside, end]):
            if address > position:
                yield "free", address - position
            size = self._live[address]
            if size is None:
                size = AllocatorModel().round_size(self._requested[address])
                if behind is not None:
                    limit = min(following, behind.get(address, following))
                    if limit - address - size <= MIB:
                        size = limit - address
            yield "used", size
            position = address + size
        if position < end:
            yield "free", end - position

    def _of_ranges(self) -> Iterator[Segment]:
        """Cut each range of addresses into pieces; there is one for a stream and a pool."""
        addresses, mapped = sorted(self._live), _joined(self._mapped)
        known = sorted(self._ranges.items())
        starts = [known[0]] if known else []
        for before, after in pairwise(known):
            if before[1] != after[1]:
                starts.append(after)
        edges = [start for start, _ in starts[1:]] + [1 << 62]
        for (start, (stream, is_small)), edge in zip(starts, edges, strict=True):
            pieces: list[tuple[State, int]] = []
            position = start = min([start, *(low for low, _ in mapped if start <= low < edge)])
            for low, high in mapped:
                if not start <= low < edge:
                    continue
                if low > position:
                    pieces.append(("unmapped", low - position))
                pieces += self._pieces(_within(addresses, low, high), low, high, None)
                position = high
            yield Segment(start, stream, is_small, tuple(pieces))


def _within(addresses: list[int], low: int, high: int) -> list[int]:
    return addresses[bisect_left(addresses, low) : bisect_left(addresses, high)]


def _without(ranges: Sequence[tuple[int, int]], low: int, high: int) -> Iterator[tuple[int, int]]:
    for start, end in ranges:
        if end <= low or start >= high:
            yield start, end
            continue
        if start < low:
            yield start, low
        if high < end:
            yield high, end


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return joined


if __name__ == "__main__":
    SNAPSHOT, SOURCE, KEPT = sys.argv[1:]
    (ONLY,) = read(Path(SNAPSHOT))
    write(replace(ONLY, source=SOURCE), Path(KEPT))
