"""Repeat the events of a card on a model of its allocator, and compare address by address."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

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


@dataclass
class Outcome:
    """Counts the repeated events, and names the first difference."""

    block_bytes: list[int] = field(default_factory=list)  # the block size of each allocation
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
        if event.action == "oom":
            return reserved + event.address
        reserved += event.reserved_bytes
    return None


def replay(trace: Trace, rules: AllocatorRules | None = None) -> Outcome:
    """Bring the model to the start of the trace, repeat each event on it, and compare."""
    return _Replay(trace, rules).run()


class _Replay:
    def __init__(self, trace: Trace, rules: AllocatorRules | None) -> None:
        at_first = AllocatorRules(expandable_segments=trace.expandable)
        self._trace, self._rules = trace, rules or at_first
        self._model = AllocatorModel(None, at_first, self._take)
        self._given: tuple[int, int] | None = None  # address and bytes of the next segment
        self._others = _OUT_OF_THE_WAY
        self._outcome = Outcome()
        self._blocks: dict[int, Block] = {}  # of the model, by their addresses in the trace
        self._segments: list[Event] = []  # reserved since the last allocation
        self._released = 0  # bytes released since then
        self._reserved = 0  # by the real card
        self._capacity = capacity_of(trace)

    def run(self) -> Outcome:
        self._begin()
        self._model.rules = self._rules
        self._model.reset_peaks()
        if self._capacity is not None:
            self._model.capacity_bytes = self._capacity
        self._reserved = self._outcome.peak_bytes = self._model.reserved_bytes
        for position, event in enumerate(self._trace.events):
            self._reserved += event.reserved_bytes
            if event.action == "segment_alloc":
                self._outcome.peak_bytes = max(self._outcome.peak_bytes, self._reserved)
                self._segments.append(event)
            elif event.action == "segment_free":
                self._released += event.num_bytes
            else:
                self._empty_before(event, position)
                self._repeat(event, position)
        self._empty_before(None, len(self._trace.events))
        self._outcome.replayed_peak_bytes = self._model.peak_reserved_bytes
        return self._outcome

    def _take(self, num_bytes: int) -> int:
        """Return the address of a new segment, as in the trace."""
        given, self._given = self._given, None
        # A range for expandable segments is larger than the part mapped.
        if given is not None and given[1] <= num_bytes:
            return given[0]
        address = self._others + 2 * MIB
        self._others = address + num_bytes
        return address

    def _malloc(self, num_bytes: int, stream: int) -> Block:
        block = self._model.malloc(num_bytes, stream)
        self._outcome.block_bytes.append(block.size_bytes)
        return block

    def _begin(self) -> None:
        """Allocate all pieces first, so that each follows the last one; then free some."""
        free: list[Block] = []
        unmapped: list[Block] = []
        if sum(map(_num_pieces, self._trace.segments)) > _MOST_PIECES:
            raise NotModelledError("it begins with more blocks than a card has")
        for segment in self._trace.segments:
            num_bytes = sum(size for _, size in segment.pieces)
            self._given = (segment.address, min(num_bytes, 2 * MIB))
            if not segment.is_small and not self._trace.expandable:
                self._model.free(self._model.malloc(num_bytes, segment.stream))
            position = segment.address
            for state, size in _small_pieces(segment):
                block = self._model.malloc(size, segment.stream)
                if block.address != position:
                    raise NotModelledError(f"its segment at {segment.address:#x} is not CUDA's")
                if state == "used":
                    self._blocks[position] = block
                else:
                    (free if state == "free" else unmapped).append(block)
                position += size
        for block in unmapped:
            self._model.free(block)
        self._model.empty_cache()
        for block in free:
            self._model.free(block)

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
            self._model.empty_cache()
        # If it was full, the reserved memory after the next allocation shows the bytes released.
        if not was_full and self._model.reserved_bytes != self._reserved - taken:
            self._differs(position, "another part of the cache was released")
        self._released = 0

    def _repeat(self, event: Event, position: int) -> None:
        if event.action == "alloc":
            self._allocate(event, position)
        elif event.action == "free" and event.address in self._blocks:
            self._model.free(self._blocks.pop(event.address))
        elif event.action == "oom":
            with suppress(AllocatorFull):
                self._model.free(self._malloc(event.num_bytes, event.stream))
                self._differs(position, "the real card ran out of memory here")

    def _allocate(self, event: Event, position: int) -> None:
        outcome = self._outcome
        if self._segments:
            self._given = (self._segments[0].address, self._segments[0].num_bytes)
        before = self._model.reserved_bytes
        try:
            block = self._malloc(event.num_bytes, event.stream)
        except AllocatorFull:
            self._differs(position, "the real card had room here")
            return
        outcome.allocations += 1
        outcome.same_address += block.address == event.address
        if block.address != event.address:
            self._differs(position, f"{block.address:#x} instead of {event.address:#x}")
        if self._segments or self._model.reserved_bytes != before:
            outcome.growths += 1
            if self._model.reserved_bytes != self._reserved:
                self._differs(position, "the real card took another amount of memory")
        self._segments.clear()
        self._blocks[event.address] = block

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
