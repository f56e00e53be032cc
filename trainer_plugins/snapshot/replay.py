"""Repeat the events of a card on a model of its allocator, and compare address by address."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from trainer_plugins.allocator.model import (
    SMALL_BYTES,
    AllocatorFull,
    AllocatorModel,
    AllocatorRules,
    Block,
)
from trainer_plugins.snapshot.cards import Event
from trainer_plugins.snapshot.trace import NotModelledError, StartSegment, Trace
from trainer_plugins.units import MIB

_OUT_OF_THE_WAY = 1 << 50  # above all addresses of a card
_MOST_PIECES = 200_000  # no real card has more blocks at the start


class ModelCard:
    """Replays on `AllocatorModel`, with the real address of each segment."""

    def __init__(self, trace: Trace, rules: AllocatorRules | None = None) -> None:
        at_first = AllocatorRules(expandable_segments=trace.expandable)
        self._rules = rules or at_first
        self._given: tuple[int, int] | None = None
        self._others = _OUT_OF_THE_WAY
        self._blocks: dict[int, Block] = {}
        self.block_bytes: list[int] = []  # the block size of each allocation
        self._model = AllocatorModel(None, at_first, self)

    @property
    def reserved_bytes(self) -> int:
        return self._model.reserved_bytes

    @property
    def peak_bytes(self) -> int:
        """Return the highest reserved memory since `start`."""
        return self._model.peak_reserved_bytes

    def start(self, capacity_bytes: int | None) -> None:
        """Count peaks from here on, and reserve no more than this; None means no limit."""
        self.block_bytes.clear()
        self._model.rules = self._rules
        self._model.reset_peaks()
        if capacity_bytes is not None:
            self._model.capacity_bytes = capacity_bytes

    def place_next(self, address: int, num_bytes: int) -> None:
        self._given = (address, num_bytes)

    def take(self, num_bytes: int) -> int:
        given, self._given = self._given, None
        # A range for expandable segments is larger than the part mapped.
        if given is not None and given[1] <= num_bytes:
            address = given[0]
        else:
            address = self._others + 2 * MIB
            self._others = address + num_bytes
        return address

    def give_back(self, address: int, num_bytes: int) -> None:
        """Do nothing: the trace says where the next one lies."""

    def malloc(self, num_bytes: int, stream: int) -> int:
        """Return the address of a new block, or raise AllocatorFull."""
        block = self._model.malloc(num_bytes, stream)
        self._blocks[block.address] = block
        self.block_bytes.append(block.size_bytes)
        return block.address

    def free(self, address: int) -> None:
        self._model.free(self._blocks.pop(address))

    def empty_cache(self) -> None:
        self._model.empty_cache()


@dataclass
class Outcome:
    """Counts the repeated events, and names the first difference."""

    allocations: int = 0
    same_address: int = 0
    growths: int = 0  # allocations that took memory from the card
    peak_bytes: int = 0  # the real card's peak reserved memory
    replayed_peak_bytes: int = 0
    first_difference: str | None = None

    @property
    def is_same(self) -> bool:
        return self.first_difference is None and self.peak_bytes == self.replayed_peak_bytes


def capacity_of(trace: Trace) -> int | None:
    """Return the process's limit: its reserved memory at the OOM, plus the card's free memory."""
    pieces = (piece for segment in trace.segments for piece in segment.pieces)
    reserved = sum(size for state, size in pieces if state != "unmapped")
    for event in trace.events:
        if event.action == "segment_alloc":
            reserved += event.num_bytes
        elif event.action == "segment_free":
            reserved -= event.num_bytes
        elif event.action == "oom":
            return reserved + event.address
    return None


def replay(trace: Trace, card: ModelCard) -> Outcome:
    """Bring a card to the start of the trace, repeat each event on it, and compare."""
    return _Replay(trace, card).run()


class _Replay:
    def __init__(self, trace: Trace, card: ModelCard) -> None:
        self._trace, self._card = trace, card
        self._outcome = Outcome()
        self._at: dict[int, int] = {}  # addresses of the trace's blocks on the replaying card
        self._segments: list[Event] = []  # reserved since the last allocation
        self._released = 0  # bytes released since then
        self._reserved = 0  # by the real card
        self._capacity = capacity_of(trace)

    def run(self) -> Outcome:
        self._begin()
        self._card.start(self._capacity)
        self._reserved = self._outcome.peak_bytes = self._card.reserved_bytes
        for position, event in enumerate(self._trace.events):
            if event.action == "segment_alloc":
                self._reserved += event.num_bytes
                self._outcome.peak_bytes = max(self._outcome.peak_bytes, self._reserved)
                self._segments.append(event)
            elif event.action == "segment_free":
                self._reserved -= event.num_bytes
                self._released += event.num_bytes
            else:
                self._empty_before(event, position)
                self._repeat(event, position)
        self._empty_before(None, len(self._trace.events))
        self._outcome.replayed_peak_bytes = self._card.peak_bytes
        return self._outcome

    def _begin(self) -> None:
        """Allocate all pieces first, so that each follows the last one; then free some."""
        free: list[int] = []
        unmapped: list[int] = []
        if sum(map(_num_pieces, self._trace.segments)) > _MOST_PIECES:
            raise NotModelledError("it begins with more blocks than a card has")
        for segment in self._trace.segments:
            num_bytes = sum(size for _, size in segment.pieces)
            self._card.place_next(segment.address, min(num_bytes, 2 * MIB))
            if not segment.is_small and not self._trace.expandable:
                self._card.free(self._card.malloc(num_bytes, segment.stream))
            position = segment.address
            for state, size in _small_pieces(segment):
                address = self._card.malloc(size, segment.stream)
                if address != position:
                    raise NotModelledError(f"its segment at {segment.address:#x} is not CUDA's")
                if state == "used":
                    self._at[position] = address
                else:
                    (free if state == "free" else unmapped).append(address)
                position += size
        for address in unmapped:
            self._card.free(address)
        self._card.empty_cache()
        for address in free:
            self._card.free(address)

    def _empty_before(self, event: Event | None, position: int) -> None:
        """Empty the cache where the run did; a full card does so by itself."""
        if not self._released:
            return
        taken = sum(each.num_bytes for each in self._segments)
        was_full = self._capacity is not None and (
            self._reserved + self._released > self._capacity
            or (event is not None and event.action == "oom")
        )
        if not was_full:
            self._card.empty_cache()
        # If it was full, the reserved memory after the next allocation shows the bytes released.
        if not was_full and self._card.reserved_bytes != self._reserved - taken:
            self._differs(position, "another part of the cache was released")
        self._released = 0

    def _repeat(self, event: Event, position: int) -> None:
        if event.action == "alloc":
            self._allocate(event, position)
        elif event.action == "free" and event.address in self._at:
            self._card.free(self._at.pop(event.address))
        elif event.action == "oom":
            with suppress(AllocatorFull):
                self._card.free(self._card.malloc(event.num_bytes, event.stream))
                self._differs(position, "the real card ran out of memory here")

    def _allocate(self, event: Event, position: int) -> None:
        outcome = self._outcome
        if self._segments:
            self._card.place_next(self._segments[0].address, self._segments[0].num_bytes)
        before = self._card.reserved_bytes
        try:
            address = self._card.malloc(event.num_bytes, event.stream)
        except AllocatorFull:
            self._differs(position, "the real card had room here")
            return
        outcome.allocations += 1
        outcome.same_address += address == event.address
        if address != event.address:
            self._differs(position, f"{address:#x} instead of {event.address:#x}")
        if self._segments or self._card.reserved_bytes != before:
            outcome.growths += 1
            if self._card.reserved_bytes != self._reserved:
                self._differs(position, "the real card took another amount of memory")
        self._segments.clear()
        self._at[event.address] = address

    def _differs(self, position: int, what: str) -> None:
        if self._outcome.first_difference is None:
            self._outcome.first_difference = f"event {position}: {what}"


def _num_pieces(segment: StartSegment) -> int:
    small = sum(size for _, size in segment.pieces) // SMALL_BYTES if segment.is_small else 0
    return len(segment.pieces) + small


def _small_pieces(segment: StartSegment) -> Iterator[tuple[str, int]]:
    """Split pieces too large for one allocation of the small pool."""
    for state, left in segment.pieces:
        while segment.is_small and left > SMALL_BYTES:
            yield state, SMALL_BYTES
            left -= SMALL_BYTES
        yield state, left
