"""Explain a snapshot, or the growth between two, by category and by source line.

The causes are judged in `trainer_plugins/explain/judges.py`, by the facts that
`trainer_plugins/explain/snapshot/fill_facts.py` reads. The replayed changes are in
`trainer_plugins/explain/snapshot/remedies.py`, and the frames of a library in
`trainer_plugins/snapshot/stacks.py`.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainer_plugins.advice.for_causes import order_remedies
from trainer_plugins.allocator.model import SMALL_BYTES, round_size
from trainer_plugins.explain.answer import Allocation, Cause, Explanation, Numbers, Remedy
from trainer_plugins.explain.judges import causes_of
from trainer_plugins.explain.shared import add_numbers, cause, insert_sentence, remedy, say
from trainer_plugins.explain.snapshot.fill_facts import facts_of
from trainer_plugins.explain.snapshot.remedies import Tries, try_changes
from trainer_plugins.printable import printable
from trainer_plugins.record.shown import Frame
from trainer_plugins.snapshot.cards import SnapshotCard, Stack
from trainer_plugins.snapshot.held import WORDS, InUse
from trainer_plugins.snapshot.lives import Life, peak_of
from trainer_plugins.snapshot.oom import SnapshotCase, case_of
from trainer_plugins.snapshot.pickled import NotReadableError, pause_collection
from trainer_plugins.snapshot.stacks import lines_of
from trainer_plugins.snapshot.trace import find_first_known, ranges_after
from trainer_plugins.units import MIB, percent, size

_MOST_LINES = 8
_MOST_ALLOCATIONS = 10
_GROWN_BYTES = 16 * MIB
_GROWN_FRACTION = 0.01
# Causes whose remedies change the computation, which no replay of a trace can show.
_NOT_REPLAYED = ("eval-logits", "generate-cache")


def explain_snapshot(path: Path) -> tuple[SnapshotCase, Explanation]:
    """Explain why a run ran out of memory; without an OOM (no causes), the memory at the peak."""
    with pause_collection():
        case = case_of(path)
        tries = try_changes(case)
        numbers = _numbers(case)
        causes = _judge(case, tries, numbers)
        return case, Explanation(
            subject=printable(path),
            causes=add_numbers(causes, numbers, lambda _: "snapshot"),
            remedies=tuple(_order(tries.remedies, causes)),
            facts=tuple(_facts(case)),
            unknown=tuple(_unknown(case, tries)),
            numbers=numbers,
        )


def _judge(case: SnapshotCase, tries: Tries, numbers: Numbers) -> tuple[Cause, ...]:
    if case.oom is None:
        return ()
    facts = facts_of(case, case.oom, tries, numbers)
    asked = say(
        "{place} asked for {requested_bytes}; the card had {free_bytes} left, and this"
        " process held {reserved_bytes}",
        facts,
        numbers,
    )
    first, *others = (facts.error,) if facts.error is not None else causes_of(facts)
    return (insert_sentence(first, asked, at=0), *others)


def _order(remedies: Sequence[Remedy], causes: Sequence[Cause]) -> Iterator[Remedy]:
    """Put remedies of the first cause first; a remedy without a cause applies to every one."""
    first = causes[0].code if causes else ""
    if first in _NOT_REPLAYED:
        for one in order_remedies(first, "snapshot"):
            yield replace(remedy(one), cause=first)
    for each in sorted(remedies, key=lambda each: each.cause not in ("", first)):
        yield replace(each, cause=each.cause or first)


def _facts(case: SnapshotCase) -> Iterator[str]:
    unused = size(case.unused_bytes)
    yield from _ending(case)
    total = max(case.in_use_bytes, 1)
    for category, num_bytes in case.held.categories.items():
        yield f"{percent(num_bytes / total)} {WORDS[category]}: {_format_bytes(num_bytes)}"
    for place, num_bytes, count in case.held.lines[:_MOST_LINES]:
        yield f"{size(num_bytes)} in {count:,} block{'s' if count > 1 else ''} from {place}"
    if case.oom is not None:
        yield (
            f"{unused} were reserved but unused, which did not help: no piece was large"
            " enough, and the allocator could release none"
        )
    elif case.unused_bytes:
        yield (
            f"{unused} were reserved but unused: that is the cache, which torch reuses, and no"
            " sign of fragmentation"
        )
    others = [each for each in case.snapshot.cards if each is not case.card]
    if others:
        held = ", ".join(f"card {each.index} {size(each.reserved_bytes)}" for each in others)
        yield f"The file has other cards, which are left out here; at its end they held: {held}"


def _ending(case: SnapshotCase) -> Iterator[str]:
    allocated = _format_bytes(case.held.allocated_bytes)
    if case.oom is None:
        category, most = case.largest_category
        yield (
            f"{allocated} were allocated at the peak of card"
            f" {case.card.index}, most of it {WORDS[category]} ({size(most)}); no OOM is recorded"
        )
        yield (
            f"{size(case.peak_reserved_bytes)} were reserved at most, over"
            f" {len(case.card.events):,} events"
        )
        return
    more = f", the last of {case.card.num_ooms}" if case.card.num_ooms > 1 else ""
    yield f"It ran out of memory on card {case.card.index}{more}"
    if case.oom_stack:
        lines = lines_of(case.snapshot.stacks[case.oom_stack])
        yield "The failed request came from " + ", called from ".join(lines)
    yield f"At the OOM {allocated} of {size(case.reserved_bytes)} reserved were allocated"


def _unknown(case: SnapshotCase, tries: Tries) -> Iterator[str]:
    if not case.card.events:
        yield (
            "The moment of the peak: the file has no events; record them with"
            " torch.cuda.memory._record_memory_history(context='alloc', max_entries=100_000)"
        )
    elif (gap := find_first_known(case.card)) is None:
        yield (
            "What happened between the last event and the dump: recording had stopped; call"
            " _dump_snapshot first"
        )
    elif gap:
        yield f"The first {gap:,} events were left out: recording stopped and started again"
    if unknown := case.held.categories.get("unknown", 0):
        yield (
            f"What holds {size(unknown)}: it was there before the recording began, or has no"
            " frames; start it before you create the model"
        )
    if case.repeated is None:
        yield f"The original sizes of blocks, which are rounded: {case.why_not_repeated}"
    elif not case.repeated.outcome.is_same:
        difference = case.repeated.outcome.first_difference or "another peak"
        yield (
            f"The replayed trace differs from the recorded one ({difference}), so figures may"
            " be slightly off"
        )
    if case.oom is not None:
        yield "The card's size and the memory of other processes: no snapshot records them"
        if tries.why_none_helps:
            yield f"Whether other settings of the allocator help: {tries.why_none_helps}"


def _format_bytes(num_bytes: int) -> str:
    """Render a size so that it can be compared to the byte."""
    return f"{size(num_bytes)} ({num_bytes:,} bytes)"


def _numbers(case: SnapshotCase) -> Numbers:
    """Return the numbers of the last OOM, else of the peak."""
    card, oom, position = case.card, case.oom, case.held.position
    at_peak = peak_of(card, case.sorter.lives)
    stack = case.oom_stack
    if oom is None and 0 <= position < len(card.events):
        stack = card.events[position].stack
    rounded = None if oom is None else round_size(oom.num_bytes)
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
        peak_allocated_bytes=case.sorter.find_held(at_peak).allocated_bytes,
        peak_reserved_bytes=case.peak_reserved_bytes,
        categories=case.held.categories,
        allocations=tuple(_allocations(case)),
        frames=_frames(case.snapshot.stacks[stack]),
    )


def _index(card: SnapshotCard, position: int) -> int | None:
    return card.events[position].number if 0 <= position < len(card.events) else None


def _frames(stack: Stack) -> tuple[Frame, ...]:
    return tuple(Frame(file=each.file, line=each.line, function=each.name) for each in stack)


def _allocations(case: SnapshotCase) -> Iterator[Allocation]:
    """Yield the largest groups of blocks with one stack and one use."""
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
    position, largest = case.held.position, 0
    alive = sorted((each.address, each.num_bytes) for each in case.sorter.alive_at(position))
    for start, end in ranges_after(case.card, position):
        inside = alive[bisect_left(alive, (start, 0)) : bisect_left(alive, (end, 0))]
        edges = [start, *(edge for at, length in inside for edge in (at, at + length)), end]
        gaps = [after - before for before, after in zip(edges[::2], edges[1::2], strict=True)]
        largest = max(largest, *gaps)
    return largest


def compare_snapshots(before: Path, after: Path) -> tuple[list[SnapshotCase], Explanation]:
    """Show the growth from a first snapshot to a second, at the OOM or else at the dump."""
    with pause_collection():
        cases = [_case(path) for path in (before, after)]
    first, second = (case.held if case.oom is not None else case.at_end for case in cases)
    grown = second.allocated_bytes - first.allocated_bytes
    causes: tuple[Cause, ...] = ()
    if grown > max(_GROWN_BYTES, _GROWN_FRACTION * first.allocated_bytes):
        causes = add_numbers([_growth(first, second, grown)], Numbers(), lambda _: "snapshot")
    return cases, Explanation(
        subject=f"{printable(before)} and {printable(after)}",
        causes=causes,
        facts=tuple(_compare(first, second, cases)),
        numbers=_numbers(cases[1]),
        before=_numbers(cases[0]),
    )


def _case(path: Path) -> SnapshotCase:
    try:
        return case_of(path)
    except NotReadableError as error:
        raise NotReadableError(f"{printable(path)}: {error}") from None


def _growth(first: InUse, second: InUse, grown: int) -> Cause:
    changes = _changes(_lines(first), _lines(second))
    return cause(
        "leak",
        *(
            say("{more_bytes} more from {place}", more_bytes=change, place=place)
            for place, change in changes[:3]
            if change > 0
        ),
        summary=f"the second snapshot has {size(grown)} more allocated than the first",
        grade="possible",
        doubt="It is a leak only if you dumped both at the same point of the loop",
        grown_bytes=grown,
    )


def _compare(first: InUse, second: InUse, cases: list[SnapshotCase]) -> Iterator[str]:
    for which, held, case in zip(("first", "second"), (first, second), cases, strict=True):
        when = "at its OOM" if case.oom is not None else "when it was dumped"
        yield (
            f"The {which} one has {_format_bytes(held.allocated_bytes)} allocated on card "
            f"{case.card.index} {when}, and {size(case.peak_reserved_bytes)} reserved at most"
        )
    for category, change in _changes(first.categories, second.categories):
        if change:
            yield f"{_format_difference(change)} {WORDS[category]}"
    for place, change in _changes(_lines(first), _lines(second))[:_MOST_LINES]:
        if change:
            yield f"{_format_difference(change)} from {place}"


def _lines(held: InUse) -> dict[str, int]:
    return {place: num_bytes for place, num_bytes, _ in held.lines}


def _changes(before: Mapping[str, int], after: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return changes, the largest growth first, the largest reduction last."""
    changes = {name: after.get(name, 0) - before.get(name, 0) for name in {**before, **after}}
    return sorted(changes.items(), key=lambda item: -item[1])


def _format_difference(num_bytes: int) -> str:
    return f"{'+' if num_bytes > 0 else '-'}{size(abs(num_bytes))}"
