"""Compares two snapshots: what grew between them, by category and by source line."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from trainer_plugins.explain.answer import Cause, Explanation
from trainer_plugins.explain.known_causes import cause
from trainer_plugins.explain.snapshot.explained import in_bytes
from trainer_plugins.explain.snapshot.held import WORDS, Held
from trainer_plugins.explain.snapshot.oom import SnapshotCase, case_of
from trainer_plugins.explain.snapshot.pickled import NotReadableError, no_collection
from trainer_plugins.printable import printable
from trainer_plugins.units import MIB, size

Name = TypeVar("Name", bound=str)

_MOST_LINES = 8
_GROWN_BYTES = 16 * MIB
_GROWN_FRACTION = 0.01


def compare_snapshots(before: Path, after: Path) -> Explanation:
    """Show what a second snapshot holds more than a first one, at the moment of each dump.

    A snapshot that ended in an OOM is compared at that OOM: its dump shows what was left after it.

    Raises:
        NotReadableError: one of the files is not a snapshot.
    """
    with no_collection():
        cases = [_case(path) for path in (before, after)]
    first, second = (case.held if case.oom is not None else case.at_end for case in cases)
    grown = second.allocated_bytes - first.allocated_bytes
    causes: tuple[Cause, ...] = ()
    if grown > max(_GROWN_BYTES, _GROWN_FRACTION * first.allocated_bytes):
        causes = (_leak(first, second, grown),)
    subject = f"{printable(before)} and {printable(after)}"
    facts = tuple(_facts(first, second, cases))
    return Explanation(subject=subject, causes=causes, remedies=(), facts=facts)


def _case(path: Path) -> SnapshotCase:
    try:
        return case_of(path)
    except NotReadableError as error:
        raise NotReadableError(f"{printable(path)}: {error}") from None


def _leak(first: Held, second: Held, grown: int) -> Cause:
    changes = _changes(_lines(first), _lines(second))
    return cause(
        "leak",
        *(f"{size(change)} more from {place}" for place, change in changes[:3] if change > 0),
        summary=f"{size(grown)} more are allocated in the second snapshot than in the first",
        grade="possible",
        doubt="It is a leak only if both were dumped at the same point of the loop",
    )


def _facts(first: Held, second: Held, cases: list[SnapshotCase]) -> Iterator[str]:
    for which, held, case in zip(("first", "second"), (first, second), cases, strict=True):
        when = "at its OOM" if case.oom is not None else "when it was dumped"
        yield (
            f"The {which} one has {in_bytes(held.allocated_bytes)} allocated on card "
            f"{case.card.index} {when}, and {size(case.peak_reserved_bytes)} reserved at most"
        )
    for category, change in _changes(first.categories, second.categories):
        if change:
            yield f"{_signed(change)} {WORDS[category]}"
    for place, change in _changes(_lines(first), _lines(second))[:_MOST_LINES]:
        if change:
            yield f"{_signed(change)} from {place}"


def _lines(held: Held) -> dict[str, int]:
    return {place: num_bytes for place, num_bytes, _ in held.lines}


def _changes(before: Mapping[Name, int], after: Mapping[Name, int]) -> list[tuple[Name, int]]:
    """Return what grew, the most first, and what shrank, the most last."""
    changes = {name: after.get(name, 0) - before.get(name, 0) for name in {**before, **after}}
    return sorted(changes.items(), key=lambda item: -item[1])


def _signed(num_bytes: int) -> str:
    return f"{'+' if num_bytes > 0 else '-'}{size(abs(num_bytes))}"
