"""Gives the numbers of a snapshot at the moment that is explained, for other programs."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from trainer_plugins.allocator.model import SMALL_BYTES, AllocatorModel
from trainer_plugins.explain.answer import Allocation, Numbers
from trainer_plugins.record.oom_record import Frame
from trainer_plugins.snapshot.cards import Card, Stack
from trainer_plugins.snapshot.lives import Life, peak_of
from trainer_plugins.snapshot.oom import SnapshotCase
from trainer_plugins.snapshot.trace import ranges_after

_MOST_ALLOCATIONS = 10


def numbers_of(case: SnapshotCase) -> Numbers:
    """Return the numbers of the last OOM, else of the peak."""
    card, oom, position = case.card, case.oom, case.held.position
    at_peak = peak_of(card, case.sorter.lives)
    stack = case.oom_stack
    if oom is None and 0 <= position < len(card.events):
        stack = card.stacks[position]
    rounded = None if oom is None else AllocatorModel().round_size(oom.num_bytes)
    return Numbers(
        card=card.index,
        stream=None if oom is None else oom.stream,
        pool=None if rounded is None else "small" if rounded <= SMALL_BYTES else "large",
        part=case.sorter.meaning(stack).work if card.events else "",
        step=case.sorter.step_at(position),
        event_index=_index(card, position),
        peak_event_index=_index(card, at_peak),
        requested_bytes=None if oom is None else oom.num_bytes,
        rounded_bytes=rounded,
        free_bytes=None if oom is None else oom.left_bytes,
        allocated_bytes=case.held.allocated_bytes,
        reserved_bytes=case.reserved_bytes,
        unused_bytes=case.unused_bytes,
        largest_gap_bytes=_largest_gap(case),
        peak_allocated_bytes=case.sorter.held_at(at_peak).allocated_bytes,
        peak_reserved_bytes=case.peak_reserved_bytes,
        categories={str(name): num_bytes for name, num_bytes in case.held.categories.items()},
        allocations=tuple(_allocations(case)),
        frames=_frames(case.snapshot.stacks[stack]),
    )


def _index(card: Card, position: int) -> int | None:
    return card.indices[position] if 0 <= position < len(card.indices) else None


def _frames(stack: Stack) -> tuple[Frame, ...]:
    return tuple(Frame(file=each.file, line=each.line, function=each.name) for each in stack)


def _allocations(case: SnapshotCase) -> Iterator[Allocation]:
    """Yield the largest groups of blocks that one stack asked for, for one use."""
    groups: defaultdict[tuple[int, str], list[Life]] = defaultdict(list)
    for life in case.sorter.alive_at(case.held.position):
        groups[life.stack, case.sorter.category(life)].append(life)
    held = Counter({key: sum(life.num_bytes for life in some) for key, some in groups.items()})
    for key, num_bytes in held.most_common(_MOST_ALLOCATIONS):
        stack, category = key
        yield Allocation(
            num_bytes=num_bytes,
            requested_bytes=sum(life.requested_bytes for life in groups[key]),
            count=len(groups[key]),
            category=category,
            place=case.sorter.place(groups[key][0]),
            frames=_frames(case.snapshot.stacks[stack]),
        )


def _largest_gap(case: SnapshotCase) -> int:
    """Return the longest stretch of reserved addresses with nothing in use, of any pool."""
    alive = sorted(
        (life.address, life.num_bytes) for life in case.sorter.alive_at(case.held.position)
    )
    largest, at = 0, 0
    for start, end in sorted(ranges_after(case.card, case.held.position)):
        position = start
        while at < len(alive) and alive[at][0] < end:
            address, num_bytes = alive[at]
            largest = max(largest, address - position)
            position = max(position, address + num_bytes)
            at += 1
        largest = max(largest, end - position)
    return largest
