"""Render torch's memory snapshots as a page: the holders of memory over time, and remedies."""

import re
from collections.abc import Iterator, Mapping, Sequence

from trainer_plugins.explain.answer import GRADES, Explanation
from trainer_plugins.printable import printable
from trainer_plugins.report.html.chart import colour_of
from trainer_plugins.report.html.page import Page, page
from trainer_plugins.snapshot.cards import Stack, StackFrame
from trainer_plugins.snapshot.held import WORDS, Category
from trainer_plugins.snapshot.lives import BEFORE, Life
from trainer_plugins.snapshot.oom import SnapshotCase
from trainer_plugins.snapshot.owners import is_users
from trainer_plugins.snapshot.stacks import is_python
from trainer_plugins.snapshot.trace import ranges_after
from trainer_plugins.units import percent, size

_MOST_LINES = 12
_CATEGORIES = tuple(WORDS)
_PASSES = {"forward": "first", "backward": "second", "optimizer": "third"}
_MODULES = ("_call_impl", "_wrapped_call_impl")  # one or two of them precede each forward
_OPERATION = re.compile(r"^at::_ops::(?!empty)(\w+)::call")
_NODE = re.compile(r"^torch::autograd::generated::(\w+)::apply")
_MOST_PARTS = 3


def snapshot_page(answer: Explanation, *cases: SnapshotCase) -> Page:
    """Render one snapshot, or two side by side, with the diagnosis."""
    is_bad = any(case.oom is not None for case in cases)
    cause = answer.causes[0].summary if answer.causes else ""
    shown = [_describe_case(case, len(cases) > 1) for case in cases]
    return page(
        "snapshot.html.jinja",
        {
            "snapshots": [
                snapshot_data(case, str(each["title"]))
                for case, each in zip(cases, shown, strict=True)
            ]
        },
        verdict=_verdict(cases, cause),
        is_bad=is_bad,
        ending=answer.facts[0],
        answer=answer,
        grades=GRADES,
        snapshots=shown,
        colours={WORDS[name]: f"c-{colour_of(name)}" for name in WORDS},
        facts=answer.facts[1:],
    )


def _describe_case(case: SnapshotCase, is_named: bool) -> Mapping[str, object]:
    when = "when it ran out" if case.oom is not None else "at the peak"
    name = f"{printable(case.snapshot.name)}: " if is_named else ""
    return {
        "title": f"{name}{size(case.in_use_bytes)} in use of {size(case.reserved_bytes)} reserved"
        f" {when}",
        "when": f"{when}, in {printable(case.snapshot.name)}" if is_named else when,
        "total": case.in_use_bytes,
        "categories": [(WORDS[name], num, "") for name, num in case.held.categories.items()],
        "lines": [
            (place, num, f"{count:,} block{'' if count == 1 else 's'}")
            for place, num, count in case.held.lines[:_MOST_LINES]
        ],
    }


def _verdict(cases: Sequence[SnapshotCase], cause: str) -> str:
    case = cases[0]
    if len(cases) > 1:
        return cause[:1].upper() + cause[1:] or "The second snapshot holds no more than the first"
    if case.oom is None:
        most, num_bytes = case.largest_category
        share = percent(num_bytes / max(case.in_use_bytes, 1))
        return f"{size(case.in_use_bytes)} in use at the peak, {share} of it {WORDS[most]}"
    return f"Out of memory: {cause}"


def snapshot_data(case: SnapshotCase, title: str) -> dict[str, object]:
    """Return the lives of all blocks, their stacks as a tree, and the reserved memory over time.

    These are columns of numbers, and each text once. Moments are numbers of events; a state is the
    one after its event. Addresses are relative to `base`.
    """
    stacks = _Stacks(case)
    rows = sorted(_rows(case, stacks), key=lambda row: row[0])
    births, lasted, sizes, asked, addresses, nodes, kinds = (
        [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(7)]
    )
    ranges = ranges_after(case.card, -1)
    segments = [
        (at, event.address, event.reserved_bytes)
        for at, event in enumerate(case.card.events)
        if event.reserved_bytes
    ]
    base = min([*addresses, *(low for low, _ in ranges), *(at for _, at, _ in segments)], default=0)
    return {
        "title": title,
        "events": len(case.card.events),
        "moment": case.held.position,
        "when": "when it ran out" if case.oom is not None else "at the peak",
        "oom": case.held.position if case.oom is not None else None,
        "asked_bytes": case.oom.num_bytes if case.oom is not None else None,
        "capacity": case.capacity_bytes if case.oom is not None else None,
        "peak": max(case.peak_reserved_bytes, case.in_use_bytes),
        "categories": list(_CATEGORIES),
        "colours": [colour_of(name) for name in _CATEGORIES],
        "birth": [after - before for before, after in zip([BEFORE, *births], births, strict=False)],
        "lasted": lasted,
        "bytes": sizes,
        "asked": asked,
        "address": [address - base for address in addresses],
        "node": nodes,
        "category": kinds,
        "base": base,
        "ranges": [[low - base, high - base] for low, high in ranges],
        "segments": [[at, address - base, num_bytes] for at, address, num_bytes in segments],
        "joins": case.card.has_mapped,
        "passes": [
            {"begin": first, "end": last + 1, "colour": _PASSES[kind]}
            for first, last, kind in case.sorter.passes
        ],
        **stacks.columns(),
    }


def _rows(
    case: SnapshotCase, stacks: "_Stacks"
) -> Iterator[tuple[int, int, int, int, int, int, int]]:
    """Yield each life; one that waited for another stream is two, the second of them waiting."""
    waits = {(wait.address, wait.until): wait.since for wait in case.card.waits}
    last = len(case.card.events)
    for life in case.sorter.lives:
        death = life.death
        since = waits.get((life.address, last + 1 if death is None else death))
        asked = life.requested_bytes if life.requested_bytes != life.num_bytes else 0
        about = (life.num_bytes, asked, life.address, stacks.node(life))
        category: Category = case.sorter.category(life)
        if since is not None and life.birth < since:
            yield life.birth, since - life.birth, *about, _CATEGORIES.index(category)
        if since is not None:
            category = "waiting"
        birth = life.birth if since is None else max(life.birth, since)
        lasted = -1 if death is None else death - birth
        if lasted:
            yield birth, lasted, *about, _CATEGORIES.index(category)


class _Stacks:
    """The tree of all stacks, outermost frames first; parents precede their children."""

    def __init__(self, case: SnapshotCase) -> None:
        self._case = case
        self._nodes: dict[tuple[int, int], int] = {}  # by parent and frame
        self._frames: dict[tuple[int, int, int, int], int] = {}
        self._files: dict[str, int] = {}
        self._names: dict[str, int] = {}
        self._known: dict[int, int] = {}  # by the number of a stack
        self._short: dict[str, tuple[str, int]] = {}

    def node(self, life: Life) -> int:
        """Return the innermost frame of the code that allocated a block."""
        if not life.stack:
            return self._add([StackFrame("", 0, self._case.sorter.place(life))])
        if life.stack not in self._known:
            self._known[life.stack] = self._add(
                _select_frames(self._case.snapshot.stacks[life.stack])
            )
        return self._known[life.stack]

    def columns(self) -> dict[str, object]:
        return {
            "parent": [parent for parent, _ in self._nodes],
            "frame": [frame for _, frame in self._nodes],
            "frames": [list(frame) for frame in self._frames],
            "files": list(self._files),
            "names": list(self._names),
        }

    def _add(self, frames: Sequence[StackFrame]) -> int:
        node = -1
        for frame in reversed(frames):
            if frame.file not in self._short:
                self._short[frame.file] = (_shorten(frame.file), int(is_users(frame.file)))
            file, is_own = self._short[frame.file]
            place = self._files.setdefault(file, len(self._files))
            name = self._names.setdefault(printable(frame.name), len(self._names))
            number = self._frames.setdefault((place, frame.line, name, is_own), len(self._frames))
            node = self._nodes.setdefault((node, number), len(self._nodes))
        return node


def _select_frames(stack: Stack) -> list[StackFrame]:
    """Drop module calls, and C++ frames except the innermost operation and its backward."""
    names = [each.name for each in stack]
    found = (next(filter(None, map(one.match, names)), None) for one in (_OPERATION, _NODE))
    python = [each for each in stack if is_python(each) and each.name not in _MODULES]
    return [*(StackFrame("", 0, each[1]) for each in found if each), *python] or [*stack]


def _shorten(file: str) -> str:
    """Name a package's file by its place there, and others by their last folders."""
    path = file.replace("\\", "/")
    if "-packages/" in path:
        return printable(path.rpartition("-packages/")[2])
    return printable("/".join(path.split("/")[-_MOST_PARTS:]))
