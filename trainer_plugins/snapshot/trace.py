"""Trace: the events of one card, and its segments before them, found by undoing the events."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from trainer_plugins.allocator.model import LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES, round_size
from trainer_plugins.snapshot.cards import Event, SnapshotCard
from trainer_plugins.units import MIB

_CHANGES = ("alloc", "free")

State = Literal["used", "free", "unmapped"]


class StartSegment(NamedTuple):
    """Holds a segment, or a range of addresses with pages mapped into it, at the first event."""

    address: int
    stream: int
    is_small: bool
    pieces: tuple[tuple[State, int], ...]  # its contents, without a hole: state and bytes

    def used(self) -> Iterator[tuple[int, int]]:
        """Yield the address and the bytes of each block in use."""
        address = self.address
        for state, num_bytes in self.pieces:
            if state == "used":
                yield address, num_bytes
            address += num_bytes


class Trace(NamedTuple):
    """Holds the events of one card, and its segments at the first of them."""

    source: str  # the repository, commit and path, or the file
    expandable: bool
    segments: tuple[StartSegment, ...]
    events: tuple[Event, ...]


class NotModelledError(ValueError):
    """Says in one line why a trace cannot be repeated on the allocator's model."""


def find_first_known(card: SnapshotCard) -> int | None:
    """Return the first event from which on the recording has no gap.

    None if recording stopped before the dump: most events do not fit the segments.
    """
    first = _undo_to_gap(card)
    return None if first > len(card.events) / 2 and not _misses_events(card) else first


def _undo_to_gap(card: SnapshotCard) -> int:
    """Undo the events back to the first gap, where a program paused recording."""
    live = {
        block.address for segment in card.segments for block in segment.blocks if block.is_active
    }
    for position in range(len(card.events) - 1, -1, -1):
        event = card.events[position]
        if event.action in _CHANGES:
            if (event.action == "alloc") is not (event.address in live):
                return position + 1
            if event.action == "alloc":
                live.remove(event.address)
            else:
                live.add(event.address)
    return 0


def _misses_events(card: SnapshotCard) -> bool:
    """Return whether an action comes twice in a row at one address."""
    last: dict[int, str] = {}
    for event in card.events:
        if event.action in _CHANGES:
            if last.get(event.address) == event.action:
                return True
            last[event.address] = event.action
    return False


def trace_of(card: SnapshotCard, source: str) -> Trace:
    """Undo the events of a card, as far as they are complete, or raise NotModelledError."""
    if any(segment.is_private for segment in card.segments):
        raise NotModelledError("it has private pools (of CUDA graphs), which are not modelled")
    if card.has_mapped and card.has_taken:
        raise NotModelledError("some of its segments are expandable and others not")
    first = find_first_known(card) or 0
    start = _Start(card, card.events[first:])
    found = start.ranges(ranges_after(card, first - 1)) if card.has_mapped else start.segments()
    return Trace(source, card.has_mapped, tuple(found), card.events[first:])


class _Start:
    def __init__(self, card: SnapshotCard, events: Sequence[Event]) -> None:
        self._events = events
        self._live: dict[int, int | None] = {}  # block sizes; None if only the request is known
        self._requested: dict[int, int] = {}
        self._taken: dict[int, tuple[int, int, bool]] = {}  # segments: bytes, stream, small
        self._pools: dict[int, tuple[int, bool]] = {}  # of mapped pages: stream, small
        for segment in card.segments:
            pool = self._pools[segment.address] = (segment.stream, segment.is_small)
            self._taken[segment.address] = (segment.num_bytes, *pool)
            self._live |= {one.address: one.num_bytes for one in segment.blocks if one.is_active}
        for event in reversed(events):
            self._undo(event)

    def _undo(self, event: Event) -> None:
        address, size = event.address, event.num_bytes
        if event.action == "alloc":
            self._live.pop(address, None)
        elif event.action == "free":
            self._live[address], self._requested[address] = None, size
        elif event.action == "segment_alloc":
            self._taken.pop(address, None)
            self._pools.setdefault(address, (event.stream, size % LARGE_SEGMENT_BYTES > 0))
        elif event.action == "segment_free":
            self._taken[address] = (size, event.stream, size == SMALL_SEGMENT_BYTES)

    def segments(self) -> Iterator[StartSegment]:
        addresses = sorted(self._live)
        behind = self._first_behind(addresses)
        for start, (size, stream, is_small) in sorted(self._taken.items()):
            inside = _within(addresses, start, start + size)
            pieces = self._pieces(inside, start, start + size, None if is_small else behind)
            yield StartSegment(start, stream, is_small, tuple(pieces))

    def _first_behind(self, addresses: list[int]) -> dict[int, int]:
        """Return the first later allocation behind each live block, in its segment."""
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

        A block that was freed within the trace has the size of its request; in the large pool, plus
        a rest of 1 MiB or less, which the allocator does not split off.
        """
        position = start
        for address, following in pairwise([*inside, end]):
            if address > position:
                yield "free", address - position
            size = self._live[address]
            if size is None:
                size = round_size(self._requested[address])
                if behind is not None:
                    limit = min(following, behind.get(address, following))
                    if limit - address - size <= MIB:
                        size = limit - address
            yield "used", size
            position = address + size
        if position < end:
            yield "free", end - position

    def ranges(self, mapped: Sequence[tuple[int, int]]) -> Iterator[StartSegment]:
        """Cut each range of addresses into pieces; each stream and pool has its own range."""
        addresses, known = sorted(self._live), sorted(self._pools.items())
        starts = known[:1] + [after for before, after in pairwise(known) if before[1] != after[1]]
        edges = [start for start, _ in starts[1:]] + [1 << 62]
        lows = [low for low, _ in mapped]
        for (start, (stream, is_small)), edge in zip(starts, edges, strict=True):
            pieces: list[tuple[State, int]] = []
            position = start
            for low, high in mapped[bisect_left(lows, start) : bisect_left(lows, edge)]:
                if low > position:
                    pieces.append(("unmapped", low - position))
                pieces += self._pieces(_within(addresses, low, high), low, high, None)
                position = high
            yield StartSegment(start, stream, is_small, tuple(pieces))


class _Ranges:
    def __init__(self) -> None:
        self._lows: list[int] = []
        self._highs: dict[int, int] = {}

    def add(self, low: int, high: int) -> None:
        if low not in self._highs:
            self._lows.insert(bisect_left(self._lows, low), low)
        self._highs[low] = high

    def remove(self, low: int, high: int) -> None:
        first = max(bisect_right(self._lows, low) - 1, 0)
        last = bisect_left(self._lows, high)
        cut = [(start, self._highs.pop(start)) for start in self._lows[first:last]]
        del self._lows[first:last]
        for start, end in cut:
            if start < min(low, end):
                self.add(start, min(low, end))
            if max(high, start) < end:
                self.add(max(high, start), end)

    def apart(self) -> list[tuple[int, int]]:
        return [(low, self._highs[low]) for low in self._lows]

    def join(self) -> list[tuple[int, int]]:
        """Return the ranges in order, joining adjacent ones."""
        joined: list[tuple[int, int]] = []
        for low, high in self.apart():
            if joined and low <= joined[-1][1]:
                low, high = joined[-1][0], max(high, joined.pop()[1])
            joined.append((low, high))
        return joined


def ranges_after(card: SnapshotCard, position: int) -> list[tuple[int, int]]:
    """Return the first and last address of each reserved segment after an event."""
    ranges = _Ranges()
    for segment in card.segments:
        ranges.add(segment.address, segment.address + segment.num_bytes)
    for event in reversed(card.events[position + 1 :]):
        if event.action == "segment_alloc":
            ranges.remove(event.address, event.address + event.num_bytes)
        elif event.action == "segment_free":
            ranges.add(event.address, event.address + event.num_bytes)
    return ranges.join() if card.has_mapped else ranges.apart()


def _within(addresses: list[int], low: int, high: int) -> list[int]:
    return addresses[bisect_left(addresses, low) : bisect_left(addresses, high)]
