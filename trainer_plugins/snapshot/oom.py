"""Case: the moment to explain, with its numbers: the OOM, else the peak. Sizes in bytes."""

from pathlib import Path
from typing import NamedTuple

from trainer_plugins.allocator.model import first_of_a_size
from trainer_plugins.snapshot.cards import Snapshot, SnapshotCard, read
from trainer_plugins.snapshot.held import Category, InUse, Sorter
from trainer_plugins.snapshot.lives import RepeatedTrace, lives_of, peak_of, repeat
from trainer_plugins.snapshot.owners import IMPOSSIBLE_BYTES, is_refused_though_free
from trainer_plugins.snapshot.stacks import Meaning
from trainer_plugins.snapshot.trace import NotModelledError


class Oom(NamedTuple):
    """Holds the request that failed."""

    num_bytes: int
    left_bytes: int  # free memory of the card
    stream: int

    @property
    def is_impossible(self) -> bool:
        return self.num_bytes > IMPOSSIBLE_BYTES

    @property
    def is_contradictory(self) -> bool:
        return is_refused_though_free(self.num_bytes, self.left_bytes, 0.05 * self.num_bytes)


class SnapshotCase(NamedTuple):
    """Holds one card of a snapshot at the moment to explain."""

    snapshot: Snapshot
    card: SnapshotCard
    sorter: Sorter
    held: InUse  # at the last OOM, else at the peak
    at_end: InUse
    reserved_bytes: int  # reserved by the process at that moment
    peak_reserved_bytes: int  # the recorded peak
    oom: Oom | None  # the last one
    oom_stack: int
    repeated: RepeatedTrace | None
    why_not_repeated: str

    @property
    def in_use_bytes(self) -> int:
        """Return the allocated bytes, with blocks that still wait for another stream."""
        return sum(self.held.categories.values())

    @property
    def unused_bytes(self) -> int:
        """Return the reserved memory not in use; at an OOM, neither usable nor releasable."""
        return self.reserved_bytes - self.in_use_bytes

    @property
    def capacity_bytes(self) -> int:
        """Return the process's limit: its reserved memory, and the card's free memory."""
        return self.reserved_bytes + (self.oom.left_bytes if self.oom is not None else 0)

    @property
    def missing_bytes(self) -> int:
        """Return the shortfall in bytes, ignoring fragmentation (negative: it would have fit)."""
        wanted = self.oom.num_bytes - self.oom.left_bytes if self.oom is not None else 0
        return wanted - self.unused_bytes

    @property
    def largest_category(self) -> tuple[Category, int]:
        return next(iter(self.held.categories.items()), ("unknown", 0))

    @property
    def request(self) -> Meaning:
        return self.sorter.meaning(self.oom_stack)


def case_of(path: Path, *, own_torch: str = "") -> SnapshotCase:
    """Read a snapshot, and move its main card to the moment to explain.

    Args:
        path: the file.
        own_torch: the version of torch that wrote it, if this package has just written it.
    """
    snapshot = read(path, is_own=bool(own_torch))
    card = snapshot.main_card()
    repeated, why = None, ""
    try:
        likely = first_of_a_size(own_torch) if own_torch else "address"
        repeated = repeat(card, snapshot, likely)
    except NotModelledError as error:
        why = str(error)
    lives = lives_of(card, repeated)
    end = max((at for at, event in enumerate(card.events) if event.action == "oom"), default=None)
    sorter = Sorter(snapshot, card, lives, end)
    position = end if end is not None else peak_of(card, lives)
    reserved = sum_reserved(card)
    refused = card.events[end] if end is not None else None
    return SnapshotCase(
        snapshot=snapshot,
        card=card,
        sorter=sorter,
        held=sorter.find_held(position),
        at_end=sorter.find_held(len(card.events)),
        reserved_bytes=reserved[position + 1],
        peak_reserved_bytes=max(reserved),
        oom=Oom(refused.num_bytes, refused.address, refused.stream) if refused else None,
        oom_stack=refused.stack if refused else 0,
        repeated=repeated,
        why_not_repeated=why,
    )


def sum_reserved(card: SnapshotCard) -> list[int]:
    """Return the reserved bytes before the first event, and after each."""
    reserved = [card.reserved_bytes]
    for event in reversed(card.events):
        reserved.append(reserved[-1] - event.reserved_bytes)
    return reserved[::-1]
