"""Held: the contents of a card's memory at one moment, by category and by source line.

Memory that a forward pass allocates and leaves for the backward pass is an activation; memory freed
within the pass was temporary, and memory that outlives a backward pass is a gradient.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from trainer_plugins.snapshot.cards import Snapshot, SnapshotCard
from trainer_plugins.snapshot.lives import BEFORE, Life
from trainer_plugins.snapshot.stacks import NOWHERE, Meaning, Work, meaning_of
from trainer_plugins.units import MIB

Category = str  # the use of a block: a name of `WORDS`

# From the bottom of a picture to its top: permanent memory first. The allocator does not count
# `waiting` blocks as allocated.
WORDS: Mapping[Category, str] = {
    "parameters": "parameters",
    "optimizer states": "optimizer states",
    "gradients": "gradients",
    "activations": "activations",
    "gathered parameters": "parameters gathered from other ranks",
    "KV cache": "cache of keys and values",
    "logits": "logits and loss",
    "temporaries": "temporaries",
    "other": "others (batches, tensors outside of modules)",
    "unknown": "unknown (there before the recording, or without frames)",
    "waiting": "released, but still read by another stream",
}

_OF_WORK: Mapping[Work, Category] = {
    "loss": "logits",
    "gathering": "gathered parameters",
    "generation": "KV cache",
}
_SHORT_EVENTS = 30  # 60 to 85 % of all freed bytes lived for fewer events
_LEAST_LOGITS_BYTES = 1 * MIB


class InUse(NamedTuple):
    """Holds the memory in use after one event; sizes in bytes."""

    position: int
    categories: Mapping[Category, int]  # everything in use, the largest first
    lines: tuple[tuple[str, int, int], ...]  # source line, bytes, blocks; the largest first

    @property
    def allocated_bytes(self) -> int:
        return sum(self.categories.values()) - self.categories.get("waiting", 0)


class Pass(NamedTuple):
    """Holds the first and the last event of a pass."""

    first: int
    last: int
    kind: str  # forward (with the loss), backward, or optimizer


class Sorter:
    """Sorts a card's blocks into categories; frees after `end`, an OOM, only unwind the error."""

    def __init__(
        self, snapshot: Snapshot, card: SnapshotCard, lives: Sequence[Life], end: int | None = None
    ) -> None:
        self._card, self.lives = card, lives
        self._end = len(card.events) if end is None else end
        self._meanings: dict[int, Meaning] = {}
        self._stacks = snapshot.stacks
        allocations = sorted((life.birth, life.stack) for life in lives if life.birth != BEFORE)
        self._has_frames = any(stack for _, stack in allocations)
        self.passes: list[Pass] = []
        for birth, stack in allocations:
            if birth < self._end:
                self._extend(birth, self.meaning(stack).work)
        self._starts = [each.first for each in self.passes]
        self._backward_before = list(
            accumulate((each.kind == "backward" for each in self.passes), initial=0)
        )
        self._fates = self._usual_fates()
        self._logits_bytes = self._sizes_of_losses()

    def meaning(self, stack: int) -> Meaning:
        if stack not in self._meanings:
            self._meanings[stack] = meaning_of(self._stacks[stack])
        return self._meanings[stack]

    def step_at(self, position: int) -> int:
        """Return how many backward passes ended before an event."""
        return self._backward_before[max(bisect_right(self._starts, position) - 1, 0)]

    def alive_at(self, position: int) -> list[Life]:
        born = (life for life in self.lives if life.birth <= position)
        return [life for life in born if life.death is None or life.death > position]

    def find_held(self, position: int) -> InUse:
        """Return the memory in use after an event."""
        waiting = {wait.address for wait in self._card.waits if wait.since <= position < wait.until}
        categories: Counter[Category] = Counter()
        bytes_from: Counter[str] = Counter()
        blocks_from: Counter[str] = Counter()
        for life in self.alive_at(position):
            category = "waiting" if life.address in waiting else self.category(life)
            categories[category] += life.num_bytes
            place = self.place(life)
            bytes_from[place] += life.num_bytes
            blocks_from[place] += 1
        lines = ((place, most, blocks_from[place]) for place, most in bytes_from.most_common())
        return InUse(position, dict(categories.most_common()), tuple(lines))

    def place(self, life: Life) -> str:
        """Name the line that allocated a block."""
        if life.stack:
            return self.meaning(life.stack).place
        if life.birth == BEFORE:
            return "before the recording began"
        return "the backward pass, without frames" if self._has_frames else NOWHERE

    def category(self, life: Life) -> Category:
        work = self.meaning(life.stack).work
        if work == "unknown" and life.birth == BEFORE:
            return "unknown"
        if work == "unknown" and not self._has_frames:
            is_short = life.death is not None and life.death - life.birth < _SHORT_EVENTS
            return "temporaries" if is_short else "unknown"
        if work in _OF_WORK:
            return _OF_WORK[work]
        has_size_of_logits = life.requested_bytes in self._logits_bytes
        if work == "forward" and has_size_of_logits:
            return "logits"
        fate = self._fate(life)
        if self._fates.get(life.stack, False) if fate is None else fate:
            return "logits" if work == "backward" and has_size_of_logits else "temporaries"
        if work in ("backward", "unknown"):
            return "gradients"
        if work == "optimizer":
            return "optimizer states"
        if work == "parameters":
            return "parameters"
        if work == "forward" or self._dies_in_backward(life):
            return "activations"
        return "other"

    def _extend(self, birth: int, work: Work) -> None:
        if work == "gathering":
            return  # in both the forward and the backward pass
        kind = work if work in ("backward", "optimizer") else "forward"
        if work == "unknown" and self._has_frames:
            kind = "backward"  # its thread has no Python frames
        if self.passes and self.passes[-1].kind == kind:
            self.passes[-1] = self.passes[-1]._replace(last=birth)
        else:
            self.passes.append(Pass(birth, birth, kind))

    def _find_death(self, life: Life) -> int | None:
        return life.death if life.death is not None and life.death < self._end else None

    def _pass_at(self, position: int) -> Pass | None:
        index = bisect_right(self._starts, position) - 1
        return self.passes[index] if index >= 0 else None

    def _fate(self, life: Life) -> bool | None:
        """Return whether a block was freed within its pass; None if the run ended too early."""
        its, death = self._pass_at(life.birth), self._find_death(life)
        if its is None or life.birth == BEFORE:
            return False
        is_last = its is self.passes[-1]
        if death is not None:
            # Passes of an evaluation follow each other: a block that ends with one was not
            # temporary.
            is_training = its.kind != "forward" or not is_last
            return death < its.last and (is_training or death - life.birth < _SHORT_EVENTS)
        return None if is_last and self._end < len(self._card.events) else False

    def _usual_fates(self) -> Mapping[int, bool]:
        """Return for each stack whether most of its bytes were freed within their pass."""
        balance: Counter[int] = Counter()
        for life in self.lives:
            if (fate := self._fate(life)) is not None:
                balance[life.stack] += life.num_bytes if fate else -life.num_bytes
        return {stack: num_bytes > 0 for stack, num_bytes in balance.items()}

    def _dies_in_backward(self, life: Life) -> bool:
        death = self._find_death(life)
        its = self._pass_at(death) if death is not None else None
        return its is not None and its.kind == "backward" and life.birth != BEFORE

    def _sizes_of_losses(self) -> frozenset[int]:
        """Return the size of the largest loss tensor, rows x vocabulary in float32, and half."""
        losses = (life for life in self.lives if self.meaning(life.stack).work == "loss")
        largest = max((life.requested_bytes for life in losses), default=0)
        return frozenset({largest, largest // 2} if largest >= _LEAST_LOGITS_BYTES else ())
