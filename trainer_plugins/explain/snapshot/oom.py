"""Case: the moment that is explained, with its numbers: the OOM, else the peak. Sizes in bytes."""

from dataclasses import dataclass
from pathlib import Path

from trainer_plugins.explain.answer import IMPOSSIBLE_BYTES
from trainer_plugins.explain.snapshot.cards import Card, Event, Snapshot, read
from trainer_plugins.explain.snapshot.held import Held, Sorter
from trainer_plugins.explain.snapshot.lives import Repeated, lives_of, peak_of, repeat
from trainer_plugins.explain.snapshot.stacks import Meaning
from trainer_plugins.explain.snapshot.trace import NotModelledError
from trainer_plugins.units import GIB


@dataclass(frozen=True, slots=True)
class SnapshotCase:
    """Holds one card of a snapshot at the moment that matters."""

    snapshot: Snapshot
    card: Card
    sorter: Sorter
    held: Held
    """At the last OOM, else where most was in use."""

    at_end: Held
    reserved_bytes: int
    """What the process held of the card at that moment."""

    peak_reserved_bytes: int
    """The highest that was recorded."""

    oom: Event | None
    """The last OOM; its `address` is what the card had left."""

    oom_stack: int
    went_on: bool
    """Whether another step was trained after the OOM: it was caught."""

    repeated: Repeated | None
    why_not_repeated: str

    @property
    def in_use_bytes(self) -> int:
        """Return what is allocated, with what still waits for another stream."""
        return sum(self.held.categories.values())

    @property
    def unused_bytes(self) -> int:
        """Return what was reserved and not in use.

        At an OOM nothing of it could be used or given back: torch takes a free block that is large
        enough, and releases every segment without a live block, before it gives up.
        """
        return self.reserved_bytes - self.in_use_bytes

    @property
    def capacity_bytes(self) -> int:
        """Return what the process could have held: what it held, and what the card had left."""
        return self.reserved_bytes + (self.oom.address if self.oom is not None else 0)

    @property
    def is_impossible(self) -> bool:
        """Say whether more was asked for than any card has."""
        return self.oom is not None and self.oom.num_bytes > IMPOSSIBLE_BYTES

    @property
    def is_contradictory(self) -> bool:
        """Say whether the request was refused though the card had room for it."""
        oom = self.oom
        return oom is not None and oom.address > 1.05 * oom.num_bytes + GIB / 4

    @property
    def missing_bytes(self) -> int:
        """Return what the request lacked even without a gap; it is negative if it had fitted."""
        wanted = self.oom.num_bytes - self.oom.address if self.oom is not None else 0
        return wanted - self.unused_bytes

    @property
    def request(self) -> Meaning:
        """Return what the stack of the failing request says."""
        return self.sorter.meaning(self.oom_stack)


def case_of(path: Path) -> SnapshotCase:
    """Read a snapshot, and bring its main card to the moment that matters.

    Raises:
        NotReadableError: it is not a snapshot.
    """
    snapshot = read(path)
    card = snapshot.main_card()
    repeated, why = None, ""
    try:
        repeated = repeat(card, snapshot)
    except NotModelledError as error:
        why = str(error)
    lives = lives_of(card, repeated)
    ooms = [at for at, event in enumerate(card.events) if event.action == "oom"]
    end = ooms[-1] if ooms else None
    sorter = Sorter(snapshot, card, lives, end)
    position = end if end is not None else peak_of(card, lives)
    reserved = reserved_after(card)
    return SnapshotCase(
        snapshot,
        card,
        sorter,
        sorter.held_at(position),
        sorter.held_at(len(card.events)),
        reserved[position + 1],
        max(reserved),
        card.events[end] if end is not None else None,
        card.stacks[end] if end is not None else 0,
        end is not None and _went_on(card, sorter, end),
        repeated,
        why,
    )


def _went_on(card: Card, sorter: Sorter, end: int) -> bool:
    return any(
        event.action == "alloc" and sorter.meaning(stack).work in ("backward", "optimizer")
        for event, stack in zip(card.events[end:], card.stacks[end:], strict=True)
    )


def reserved_after(card: Card) -> list[int]:
    """Return what was reserved before the first event, and after each."""
    reserved = [card.reserved_bytes]
    for event in reversed(card.events):
        step = {"segment_alloc": -1, "segment_free": 1}.get(event.action, 0)
        reserved.append(reserved[-1] + step * event.num_bytes)
    return reserved[::-1]
