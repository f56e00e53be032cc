"""DryResult: the readings of a dry run, with the allocator's recording of its fullest process."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any, NamedTuple

from trainer_plugins.planner.plan import Category, Moment
from trainer_plugins.snapshot.held import Category as HeldAs
from trainer_plugins.snapshot.lives import BEFORE, Life, count_changes
from trainer_plugins.snapshot.oom import SnapshotCase, sum_reserved

_MOST_POINTS = 400
"""Of a timeline, plus at most one more for each moment."""

_CATEGORIES: Mapping[HeldAs, Category] = {
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer states": "optimizer states",
    "activations": "activations",
    "logits": "logits and loss",
    "temporaries": "activations",
    "other": "activations",
    "unknown": "workspaces",
    "gathered parameters": "sharding buffers",
    "KV cache": "KV cache",
    "waiting": "activations",
}


class SmallestCard(NamedTuple):
    """Holds the smallest card on which all processes of a command complete."""

    card_bytes: int
    fails_on_less: str | None  # the line whose allocation fails on a smaller card


class DryResult:
    """Holds the readings of a command's processes, the fullest one first."""

    def __init__(
        self, seen: list[dict[str, Any]], case: SnapshotCase, smallest: SmallestCard | None
    ) -> None:
        self.seen, self.case, self.smallest = seen, case, smallest
        self._starts: tuple[int, ...]
        self._moments: tuple[Moment, ...]
        self._starts, self._moments = zip(*seen[0]["began"], strict=True)
        self.timeline = [*self._points()]
        """Moment, allocated and reserved bytes, each the maximum of equally many events."""

    def find_peak_blocks(self) -> list[Life]:
        """Return the blocks that were in use at the peak."""
        return self.case.sorter.alive_at(self.case.held.position)

    def name_of(self, life: Life) -> tuple[Category, str]:
        """Return the category of a block, and the parameter that it belongs to, if any."""
        return self._names.get(life.birth) or (_CATEGORIES[self.case.sorter.category(life)], "")

    def moment_of(self, position: int) -> Moment:
        """Return the moment of an event; events before the recording belong to the first moment."""
        time_us = self.case.card.events[position].time_us if position >= 0 else 0
        return self._moments[bisect_right(self._starts, time_us) - 1]

    @property
    def died(self) -> bool:
        """Return whether a process ended because it was out of memory."""
        return any(each["died"] for each in self.seen)

    @property
    def failed_request(self) -> tuple[int, str | None]:
        """Return the bytes and the line of the fullest process's failed allocation; 0 if none."""
        oom = self.case.oom
        return (oom.num_bytes, self.case.request.place) if oom is not None else (0, None)

    @cached_property
    def _names(self) -> dict[int, tuple[Category, str]]:
        """Name allocations by their events, from the tensors seen at their addresses over time."""
        found: dict[int, tuple[Category, str]] = {}
        lives = [life for life in self.case.sorter.lives if life.birth != BEFORE]
        births = {life.birth: life for life in lives}
        deaths = {life.death: life for life in lives}
        alive: dict[int, Life] = {}  # by address
        done = 0
        for time_us, names in sorted(self.seen[0]["names"], key=lambda each: each[0]):
            end = bisect_left(self.case.card.events, time_us, key=lambda event: event.time_us)
            for position in range(done, end):
                if (ended := deaths.get(position)) is not None:
                    del alive[ended.address]
                elif (born := births.get(position)) is not None:
                    alive[born.address] = born
            done = max(done, end)
            starts = sorted(alive)
            for address, (category, name) in names.items():
                at = bisect_right(starts, int(address)) - 1
                if at >= 0 and int(address) < starts[at] + alive[starts[at]].num_bytes:
                    found.setdefault(alive[starts[at]].birth, (category, name))
        return found

    def _points(self) -> Iterator[tuple[Moment, int, int]]:
        card, changes = self.case.card, count_changes(self.case.sorter.lives)
        positions, reserved = range(len(card.events)), sum_reserved(card)
        held = [*accumulate((changes[at] for at in positions), initial=changes[BEFORE])]
        interval = len(positions) // _MOST_POINTS + 1
        for moment, group in groupby(positions, key=self.moment_of):
            of_moment = [*group]
            for first in of_moment[::interval]:
                after = slice(first + 1, min(first + interval, of_moment[-1] + 1) + 1)
                yield moment, max(held[after]), max(reserved[after])
