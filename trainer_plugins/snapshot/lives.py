"""Life: each block from allocation to release, in the allocator's sizes."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from trainer_plugins.allocator.model import (
    FIRST_OF_A_SIZE,
    AllocatorRules,
    FirstOfASize,
    round_size,
)
from trainer_plugins.snapshot.cards import Snapshot, SnapshotCard
from trainer_plugins.snapshot.replay import Outcome, replay
from trainer_plugins.snapshot.trace import NotModelledError, Trace, find_first_known, trace_of

BEFORE = -1  # the birth of a block that existed before the first event


@dataclass(slots=True)
class Life:
    """Holds the lifetime of one block, as numbers of events."""

    address: int
    birth: int
    death: int | None  # None if it is alive at the end
    num_bytes: int
    requested_bytes: int
    stack: int


class RepeatedTrace(NamedTuple):
    """Holds the result of a trace repeated on the allocator's model."""

    trace: Trace
    rules: AllocatorRules  # the settings of the run
    outcome: Outcome


def repeat(
    card: SnapshotCard, snapshot: Snapshot, likely: FirstOfASize = "address"
) -> RepeatedTrace:
    """Repeat the events of a card, or raise NotModelledError.

    A snapshot does not say which version of torch wrote it: the `likely` rule is tried first.
    """
    trace = trace_of(card, snapshot.name)
    rules = AllocatorRules(expandable_segments=trace.expandable)
    split = snapshot.settings.get("max_split_size")  # as torch 2.13 writes it; -1 means no limit
    if isinstance(split, int) and split > 0:
        rules = rules._replace(max_split_bytes=split)
    found: list[RepeatedTrace] = []
    for first in sorted(FIRST_OF_A_SIZE, key=lambda each: each != likely):
        found.append(_repeat(trace, rules._replace(first_of_a_size=first)))
        if found[-1].outcome.is_same:
            break
    return max(found, key=lambda each: each.outcome.same_address)


def _repeat(trace: Trace, rules: AllocatorRules) -> RepeatedTrace:
    try:
        outcome = replay(trace, rules)
    except NotModelledError:
        raise
    # Addresses that no allocator returned, found only in edited files.
    except (KeyError, ValueError, IndexError, AttributeError):
        raise NotModelledError("its events contradict each other") from None
    if len(outcome.block_bytes) != sum(event.action == "alloc" for event in trace.events):
        raise NotModelledError(outcome.first_difference or "its events contradict each other")
    return RepeatedTrace(trace, rules, outcome)


def lives_of(card: SnapshotCard, repeated: RepeatedTrace | None) -> list[Life]:
    """Follow each block; without a replay, its size is the request, rounded up."""
    blocks = [block for segment in card.segments for block in segment.blocks if block.is_active]
    at_start: dict[int, int] = {}
    if repeated is not None:
        sizes = iter(repeated.outcome.block_bytes)
        at_start |= (used for segment in repeated.trace.segments for used in segment.used())
        first = len(card.events) - len(repeated.trace.events)
    else:
        first = find_first_known(card) or 0
    lives: list[Life] = []
    alive: dict[int, Life] = {}
    for position, event in enumerate(card.events[first:], first):
        if event.action == "alloc":
            num_bytes = next(sizes) if repeated is not None else round_size(event.num_bytes)
            life = Life(event.address, position, None, num_bytes, event.num_bytes, event.stack)
            alive[event.address] = life
            lives.append(life)
        elif event.action == "free":
            if ended := alive.pop(event.address, None):
                ended.death = position
            else:
                num_bytes = at_start.get(event.address, round_size(event.num_bytes))
                lives.append(Life(event.address, BEFORE, position, num_bytes, event.num_bytes, 0))
    for address, size, _, stack in {block.address: block for block in blocks}.values():
        if address in alive:
            alive[address].num_bytes = size  # as the file states it
        else:
            lives.append(Life(address, BEFORE, None, size, size, stack))
    return lives


def count_changes(lives: Iterable[Life]) -> Counter[int]:
    """Return by how many bytes each event changes the memory in use."""
    changes: Counter[int] = Counter()
    for life in lives:
        changes[life.birth] += life.num_bytes
        if life.death is not None:
            changes[life.death] -= life.num_bytes
    return changes


def peak_of(card: SnapshotCard, lives: Iterable[Life]) -> int:
    """Return the event after which most bytes are in use; the last one if nothing was recorded."""
    changes = count_changes(lives)
    positions = sorted(changes)
    held = accumulate(changes[position] for position in positions)
    return max(zip(held, positions, strict=True), default=(0, len(card.events) - 1))[1]
