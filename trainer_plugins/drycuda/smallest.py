"""Find the least memory with which a run completes, from its allocator's recording.

We repeat the run's requests on the model of torch's allocator, which flushes its cache on a full
card. The model gives every block of a dry run its recorded address.
"""

from collections.abc import Iterator

from trainer_plugins.allocator.model import AllocatorFull, AllocatorModel, AllocatorRules, Block
from trainer_plugins.snapshot.cards import Event, SnapshotCard
from trainer_plugins.snapshot.oom import sum_reserved
from trainer_plugins.units import MIB

_MOST_GUESSES = 6  # each may be little above the last one; then by bisection


def smallest_room(
    card: SnapshotCard,
    rules: AllocatorRules,
    room_bytes: int,
    allocated_bytes: int | None = None,
) -> tuple[int, int | None] | None:
    """Return the least memory with which a card's events succeed.

    It is a multiple of 1 MiB, without the context. The second number is the event that fails with 1
    MiB less. `room_bytes` is the allocator's share of the recorded card, and `allocated_bytes` its
    allocated peak, if the model has repeated the events. Returns None if the model does not repeat
    the recorded peak, as with the pools of CUDA graphs, or if the first events are lost.
    """
    run = [*_steps(card, room_bytes)]
    reserved = max(sum_reserved(card))
    if allocated_bytes is None:
        whole = AllocatorModel(room_bytes, rules)
        try:
            is_same = _failure(whole, run) is None and whole.peak_reserved_bytes == reserved
        except KeyError:  # frees a block that was allocated before the first event
            return None
        if not is_same:
            return None
        allocated_bytes = whole.peak_allocated_bytes
    low, high = allocated_bytes // MIB, -(-reserved // MIB)  # high succeeds
    likely, wanted, num_left, fails_at = low, 0, _MOST_GUESSES, None
    while low < high:
        tried = likely if num_left > 0 and low <= likely < high else (low + high) // 2
        num_left -= 1
        model = AllocatorModel(tried * MIB, rules)
        failure = _failure(model, run)
        if failure is None:  # one MiB less fails, if a failure has asked for this many
            high, likely = tried, tried - 1 if tried == wanted else 0
        else:
            fails_at, num_bytes = failure
            low = tried + 1
            likely = wanted = -(-(model.reserved_bytes + num_bytes) // MIB)
    return high * MIB, fails_at


_Step = tuple[int, Event | None]  # an event and its position; None: the program flushed the cache


def _steps(card: SnapshotCard, room_bytes: int) -> Iterator[_Step]:
    """Yield the program's own actions, without the flushes of a full card."""
    reserved, released = sum_reserved(card)[0], 0
    for position, event in enumerate(card.events):
        reserved += event.reserved_bytes
        released -= min(0, event.reserved_bytes)
        if event.action in ("alloc", "free"):
            if released and reserved + released <= room_bytes:
                yield position, None
            released = 0
            yield position, event


def _failure(model: AllocatorModel, run: list[_Step]) -> tuple[int, int] | None:
    """Return the event that a card refuses, and the bytes it asks for; None if all succeed."""
    blocks: dict[int, Block] = {}
    for position, event in run:
        if event is None:
            model.empty_cache()
        elif event.action == "free":
            model.free(blocks.pop(event.address))
        else:
            try:
                blocks[event.address] = model.malloc(event.num_bytes, event.stream)
            except AllocatorFull:
                return position, model.segment_bytes(event.num_bytes)
    return None
