"""Life: each block from its allocation to its release, and when most bytes were in use.

Sizes are those of blocks: what the allocator gave, which is at least what was asked for.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trainer_plugins.allocator.model import AllocatorModel, AllocatorRules
from trainer_plugins.explain.snapshot.cards import Card, Snapshot
from trainer_plugins.explain.snapshot.replay import ModelCard, Outcome, replay
from trainer_plugins.explain.snapshot.trace import NotModelledError, Trace, known_from, trace_of

BEFORE = -1
"""The birth of a block that was there before the first event."""


@dataclass(slots=True)
class Life:
    """Holds when one block lived: numbers of events."""

    address: int
    birth: int
    death: int | None  # None if it is alive at the end
    num_bytes: int
    requested_bytes: int
    stack: int

    def is_alive_after(self, position: int) -> bool:
        return self.birth <= position and (self.death is None or self.death > position)


@dataclass(frozen=True, slots=True)
class Repeated:
    """Holds the result of a trace that was repeated on the allocator's model."""

    trace: Trace
    rules: AllocatorRules  # the settings of the run
    outcome: Outcome
    block_bytes: tuple[int, ...]  # the size of the block that each allocation got


class _MeasuredCard(ModelCard):
    """Notes the size of each block that is allocated once the trace runs."""

    def __init__(self, trace: Trace, rules: AllocatorRules) -> None:
        super().__init__(trace, rules=rules)
        self.block_bytes: list[int] = []

    def start(self, capacity_bytes: int | None) -> None:
        super().start(capacity_bytes)
        self.block_bytes.clear()

    def malloc(self, num_bytes: int, stream: int) -> int:
        address = super().malloc(num_bytes, stream)
        self.block_bytes.append(self.block_bytes_at(address))
        return address


def repeat(card: Card, snapshot: Snapshot) -> Repeated:
    """Repeat the events of a card.

    Raises:
        NotModelledError: it holds what the allocator's model does not have.
    """
    trace = trace_of(card, snapshot.name)
    rules = _rules_of(snapshot.settings, trace)
    measured = _MeasuredCard(trace, rules)
    try:
        outcome = replay(trace, measured)
    # Addresses that no allocator gave, which only an edited file holds.
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, NotModelledError):
            raise
        raise NotModelledError("its events contradict each other") from None
    if len(measured.block_bytes) != sum(event.action == "alloc" for event in trace.events):
        raise NotModelledError(outcome.first_difference or "its events contradict each other")
    return Repeated(trace, rules, outcome, tuple(measured.block_bytes))


def _rules_of(settings: Mapping[str, object], trace: Trace) -> AllocatorRules:
    """Read the settings that a snapshot names, as `_dump_snapshot` of torch 2.13 writes them."""
    rules = AllocatorRules(expandable_segments=trace.expandable)
    split = settings.get("max_split_size")  # -1 is no limit
    return replace(rules, max_split_bytes=split) if isinstance(split, int) and split > 0 else rules


def lives_of(card: Card, repeated: Repeated | None) -> list[Life]:
    """Follow each block; without a replay, sizes are what was asked for, rounded up."""
    at_end = {
        block.address: block
        for segment in card.segments
        for block in segment.blocks
        if block.is_active
    }
    round_size = AllocatorModel().round_size
    sizes: Iterator[int] | None = iter(repeated.block_bytes) if repeated is not None else None
    at_start = _at_start(repeated.trace) if repeated is not None else {}
    first = known_from(card)
    lives: list[Life] = []
    alive: dict[int, Life] = {}
    for position, event in enumerate(card.events[first:], first):
        if event.action == "alloc":
            num_bytes = next(sizes) if sizes is not None else round_size(event.num_bytes)
            life = Life(
                event.address, position, None, num_bytes, event.num_bytes, card.stacks[position]
            )
            alive[event.address] = life
            lives.append(life)
        elif event.action == "free":
            ended = alive.pop(event.address, None)
            if ended is not None:
                ended.death = position
            else:
                num_bytes = at_start.get(event.address, round_size(event.num_bytes))
                lives.append(Life(event.address, BEFORE, position, num_bytes, event.num_bytes, 0))
    for address, block in at_end.items():
        if address in alive:
            alive[address].num_bytes = block.num_bytes  # as the file states it
        else:
            size = block.num_bytes
            lives.append(Life(address, BEFORE, None, size, size, block.stack))
    return lives


def peak_of(card: Card, lives: Sequence[Life]) -> int:
    """Return the event after which most bytes are in use; the last one if nothing is recorded."""
    changes: dict[int, int] = {}
    for life in lives:
        changes[life.birth] = changes.get(life.birth, 0) + life.num_bytes
        if life.death is not None:
            changes[life.death] = changes.get(life.death, 0) - life.num_bytes
    highest, peak, held = -1, len(card.events) - 1, 0
    for position in sorted(changes):
        held += changes[position]
        if held >= highest:
            highest, peak = held, position
    return peak


def _at_start(trace: Trace) -> Mapping[int, int]:
    found = {}
    for segment in trace.segments:
        position = segment.address
        for state, num_bytes in segment.pieces:
            if state == "used":
                found[position] = num_bytes
            position += num_bytes
    return found
