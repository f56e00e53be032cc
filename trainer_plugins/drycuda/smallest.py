"""Finds the least memory with which a run completes, from what its allocator has recorded.

What the run asked for is repeated on the model of torch's allocator, which releases its cache where
a card is full, by bisection. The model gives every block of a dry run the address that it had.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from trainer_plugins.allocator.model import AllocatorFull, AllocatorModel, AllocatorRules, Block
from trainer_plugins.snapshot.cards import SnapshotCard
from trainer_plugins.snapshot.oom import sum_reserved
from trainer_plugins.units import MIB

_EMPTY = -1


def smallest_room(
    card: SnapshotCard, rules: AllocatorRules, room_bytes: int
) -> tuple[int, int | None] | None:
    """Return the least memory with which the events of a card go through.

    It is a multiple of 1 MiB, without the context. The second number is that of the event that
    fails on 1 MiB less. `room_bytes` is what the allocator could have of the recorded card.

    Returns None if the model does not repeat the recorded peak, as with the pools of CUDA graphs,
    or if the first events are lost.
    """
    run = [*_steps(card, room_bytes)]
    whole = AllocatorModel(room_bytes, rules)
    reserved = max(sum_reserved(card))
    try:
        is_same = _failure(whole, run) is None and whole.peak_reserved_bytes == reserved
    except KeyError:  # a block is freed that was allocated before the first event
        return None
    if not is_same:
        return None
    low, high = whole.peak_allocated_bytes // MIB, -(-reserved // MIB)  # high goes through
    fails_at = None
    while low < high:
        middle = (low + high) // 2
        failure = _failure(AllocatorModel(middle * MIB, rules), run)
        if failure is None:
            high = middle
        else:
            low, fails_at = middle + 1, failure
    return high * MIB, fails_at


class _Step(NamedTuple):
    address: int
    num_bytes: int
    """0 of a block that is freed; `_EMPTY` where the program released the cache."""

    stream: int
    event: int


def _steps(card: SnapshotCard, room_bytes: int) -> Iterator[_Step]:
    """Yield what the program did; what a full card released is not of the program."""
    reserved, released = sum_reserved(card)[0], 0
    for number, event in enumerate(card.events):
        if event.action == "segment_free":
            reserved -= event.num_bytes
            released += event.num_bytes
        elif event.action == "segment_alloc":
            reserved += event.num_bytes
        elif event.action in ("alloc", "free"):
            if released and reserved + released <= room_bytes:
                yield _Step(0, _EMPTY, 0, number)
            released = 0
            size = event.num_bytes if event.action == "alloc" else 0
            yield _Step(event.address, size, event.stream, number)


def _failure(model: AllocatorModel, run: list[_Step]) -> int | None:
    """Return the event that a card refuses; None if all go through."""
    blocks: dict[int, Block] = {}
    malloc: Callable[[int, int], Block] = model.malloc
    for address, num_bytes, stream, event in run:
        if num_bytes > 0:
            try:
                blocks[address] = malloc(num_bytes, stream)
            except AllocatorFull:
                return event
        elif num_bytes == 0:
            model.free(blocks.pop(address))
        else:
            model.empty_cache()
    return None
