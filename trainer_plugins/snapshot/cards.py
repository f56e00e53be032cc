"""Snapshot: torch's record of each card, with every value checked. Sizes in bytes.

Without recording there are no events; `memory_snapshot()` is a bare list of segments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trainer_plugins.printable import printable
from trainer_plugins.snapshot.pickled import NotReadableError, load, load_own, pause_collection
from trainer_plugins.units import GIB

Action = Literal["alloc", "free", "segment_alloc", "segment_free", "oom"]
ACTIONS: Mapping[str, Action] = {
    "alloc": "alloc",
    "free_completed": "free",
    "segment_alloc": "segment_alloc",
    "segment_map": "segment_alloc",
    "segment_free": "segment_free",
    "segment_unmap": "segment_free",
    "oom": "oom",
}
_TAKES = {"segment_alloc": 1, "segment_free": -1}
_LARGEST = 1024 * GIB  # no card holds more; a failing request may be larger
_HIGHEST = 1 << 60
_MOST_FRAMES = 4096


class Event(NamedTuple):
    """Holds one action of the allocator; mapped memory counts as a segment too."""

    action: Action
    address: int  # for an `oom`, the free bytes of the card
    num_bytes: int  # the bytes requested; for a segment, the bytes reserved
    stream: int
    stack: int = 0  # the number of its stack
    number: int = 0  # in the file's trace of this card
    time_us: int = 0  # since 1970

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes that it takes from the card; negative if it gives some back."""
        return _TAKES.get(self.action, 0) * self.num_bytes


class StackFrame(NamedTuple):
    """Holds one line of a stack, from Python or C++."""

    file: str
    line: int
    name: str


Stack = tuple[StackFrame, ...]  # the innermost first; empty if not recorded


class Wait(NamedTuple):
    """Holds a block that was released while another stream was still reading it."""

    address: int
    since: int  # the number of events before its release
    until: int  # the number of events before it was free; beyond the last event if it never was


class SnapshotBlock(NamedTuple):
    """Holds a piece of a segment at the end of the recording."""

    address: int
    num_bytes: int
    is_active: bool  # in use, or still read by another stream
    stack: int


class Segment(NamedTuple):
    """Holds a segment at the end of the recording."""

    address: int
    num_bytes: int
    allocated_bytes: int  # as the file states it
    stream: int
    is_small: bool
    is_expandable: bool
    is_private: bool  # belongs to a CUDA graph or to a pool of the program
    blocks: tuple[SnapshotBlock, ...]


@dataclass(frozen=True, slots=True)
class SnapshotCard:
    """Holds the segments of one card at the end, and the events before."""

    index: int
    segments: tuple[Segment, ...]
    events: tuple[Event, ...]
    waits: tuple[Wait, ...]
    has_mapped: bool  # whether it has, or had, expandable segments, into which pages are mapped
    has_taken: bool  # whether it has, or had, other segments

    @property
    def allocated_bytes(self) -> int:
        """Return the allocated bytes that the file states at its end."""
        return sum(segment.allocated_bytes for segment in self.segments)

    @property
    def reserved_bytes(self) -> int:
        """Return the reserved bytes of the process at the end."""
        return sum(segment.num_bytes for segment in self.segments)

    @property
    def num_ooms(self) -> int:
        return sum(event.action == "oom" for event in self.events)


class Snapshot(NamedTuple):
    """Holds the content of one file."""

    name: str
    cards: tuple[SnapshotCard, ...]
    stacks: tuple[Stack, ...]  # each distinct stack once; number 0 is the empty one
    settings: Mapping[str, Any]

    def main_card(self) -> SnapshotCard:
        """Choose the card to explain: one that ran out of memory, else the busiest."""
        return max(
            self.cards, key=lambda one: (one.num_ooms > 0, len(one.events), one.reserved_bytes)
        )


def read(path: Path, *, is_own: bool = False) -> Snapshot:
    """Read a snapshot of torch, or raise NotReadableError.

    Args:
        path: the file.
        is_own: whether this package has just written it, so that it can be trusted.
    """
    with pause_collection():
        raw = load_own(path) if is_own else load(path)
        if isinstance(raw, list):  # torch.cuda.memory_snapshot()
            raw = {"segments": raw}
        if not isinstance(raw, dict) or not isinstance(raw.get("segments"), list):
            raise NotReadableError(
                "it is a pickle, but no memory snapshot: it has no list of segments; give the "
                "file that torch.cuda.memory._dump_snapshot has written"
            )
        try:
            found = _Reader().snapshot(raw, path.name)
        except NotReadableError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise NotReadableError(
                "it is no memory snapshot of a known format: a value has another name or type "
                f"than torch gives it ({type(error).__name__}: {printable(error)}); write it with "
                "torch.cuda.memory._dump_snapshot of torch 2.1 or later, and do not edit it"
            ) from None
    if not found.cards:
        raise NotReadableError(
            "it is the snapshot of a process that held no memory of a card; dump it before the "
            "model is freed"
        )
    return found


class _Reader:
    def __init__(self) -> None:
        self._stacks: list[Stack] = [()]
        self._numbers: dict[Stack, int] = {(): 0}
        # By the identities of the frames, or of their list: they live as long as the file is read.
        self._known: dict[tuple[int, ...] | int, int] = {}
        self._frames: dict[int, StackFrame] = {}

    def snapshot(self, raw: Mapping[str, Any], name: str) -> Snapshot:
        segments: dict[int, list[Segment]] = {}
        for each in raw["segments"]:
            segments.setdefault(_number(each["device"], 1024), []).append(self._segment(each))
        traces = dict(enumerate(raw.get("device_traces") or []))
        used = {*segments, *(index for index, events in traces.items() if events)}
        cards = tuple(
            self._card(index, segments.get(index, []), traces.get(index, []))
            for index in sorted(used)
        )
        settings = raw.get("allocator_settings")
        settings = settings if isinstance(settings, dict) else {}
        return Snapshot(name, cards, tuple(self._stacks), settings)

    def _card(
        self, index: int, segments: list[Segment], raw: Sequence[Mapping[str, Any]]
    ) -> SnapshotCard:
        found: list[Event] = []
        waits: list[Wait] = []
        released: dict[int, int] = {}
        names = {"segment_map" if each.is_expandable else "segment_alloc" for each in segments}
        for number, each in enumerate(raw):
            name = each["action"]
            names.add(name)
            if name == "free_requested":
                released[_number(each["addr"])] = len(found)
            if name not in ACTIONS:
                continue
            action, is_oom = ACTIONS[name], name == "oom"
            address = _number(each["device_free" if is_oom else "addr"])
            num_bytes = _number(each["size"], _HIGHEST if is_oom else _LARGEST)
            if action == "free" and (since := released.pop(address, len(found))) < len(found):
                waits.append(Wait(address, since, len(found)))
            stack, time_us = self._stack(each.get("frames")), _number(each.get("time_us", 0))
            stream = _number(each["stream"])
            found.append(Event(action, address, num_bytes, stream, stack, number, time_us))
        waits += [Wait(address, since, len(found) + 1) for address, since in released.items()]
        return SnapshotCard(
            index,
            tuple(sorted(segments)),
            tuple(found),
            tuple(waits),
            has_mapped=bool(names & {"segment_map", "segment_unmap"}),
            has_taken=bool(names & {"segment_alloc", "segment_free"}),
        )

    def _segment(self, raw: Mapping[str, Any]) -> Segment:
        start, num_bytes = _number(raw["address"]), _number(raw["total_size"], _LARGEST)
        blocks = tuple(map(self._block, raw["blocks"]))
        ends = [start, *(block.address + block.num_bytes for block in blocks)]
        starts = [*(block.address for block in blocks), start + num_bytes]
        if any(end > following for end, following in zip(ends, starts, strict=True)):
            raise NotReadableError(
                f"its segment at {start:#x} is smaller than its blocks, so it was edited or is "
                "damaged; write a new one"
            )
        active_bytes = sum(block.num_bytes for block in blocks if block.is_active)
        return Segment(
            start,
            num_bytes,
            _number(raw.get("allocated_size", active_bytes), num_bytes),
            _number(raw["stream"]),
            raw["segment_type"] == "small",
            bool(raw.get("is_expandable")),
            any(raw.get("segment_pool_id", ())),
            blocks,
        )

    def _block(self, raw: Mapping[str, Any]) -> SnapshotBlock:
        address, num_bytes = _number(raw["address"]), _number(raw["size"], _LARGEST)
        is_active = raw["state"].startswith("active")
        return SnapshotBlock(address, num_bytes, is_active, self._stack(raw.get("frames")))

    def _stack(self, frames: Sequence[Mapping[str, Any]] | None) -> int:
        if not frames:
            return 0
        number = self._known.get(id(frames))
        if number is None:
            key = tuple(map(id, frames[:_MOST_FRAMES]))
            number = self._known.get(key)
            if number is None:
                stack = tuple(map(self._frame, frames[:_MOST_FRAMES]))
                number = self._numbers.setdefault(stack, len(self._stacks))
                if number == len(self._stacks):
                    self._stacks.append(stack)
            self._known[key] = self._known[id(frames)] = number
        return number

    def _frame(self, raw: Mapping[str, Any]) -> StackFrame:
        if known := self._frames.get(id(raw)):
            return known
        file, line, name = raw.get("filename") or "", raw.get("line") or 0, raw.get("name") or ""
        if not (isinstance(file, str) and isinstance(line, int) and isinstance(name, str)):
            raise TypeError("a frame holds other things than texts and a line")
        frame = self._frames[id(raw)] = StackFrame(file, line, name)
        return frame


def _number(value: object, largest: int = _HIGHEST) -> int:
    if type(value) is not int or not 0 <= value <= largest:
        shown = value if type(value) is int else type(value).__name__
        raise ValueError(f"{shown} stands where a number of bytes or an address belongs")
    return value
