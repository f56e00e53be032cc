"""Place the events of a run: bands behind a chart of its memory, and marks below it."""

from collections import Counter
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import NamedTuple

from trainer_plugins.finding import Finding
from trainer_plugins.record.history import Timelines, entries_of, ranks_in_words
from trainer_plugins.record.timeline import Entry, Failure, Flush, Remark, Sample
from trainer_plugins.report.html.chart import Key, Mark, Span, colour_of
from trainer_plugins.report.summary import steps_in_words
from trainer_plugins.units import size

_AT_ONCE = 1000  # bands of one kind, and marks of one finding, over the whole run
_TRAINING = ("train", "begin", "end")


class Duration(NamedTuple):
    """Holds the time that all charts of a run share."""

    began_seconds: float  # since the Unix epoch
    seconds: float

    def since(self, time_seconds: float) -> float:
        """Return the seconds from the beginning to a time, within the run."""
        return round(min(max(time_seconds - self.began_seconds, 0.0), self.seconds), 3)

    def place(self, time_seconds: float) -> int:
        return int(_AT_ONCE * self.since(time_seconds) / self.seconds)


class Noted(NamedTuple):
    """Holds the worst finding of a code, with all moments at which ranks reported one."""

    number: int
    finding: Finding
    moments: tuple[tuple[int, Remark], ...]  # rank and remark, by time

    @property
    def where(self) -> str:
        steps = [remark.step for _, remark in self.moments]
        ranks = {rank for rank, _ in self.moments}
        return f"{steps_in_words(min(steps), max(steps))}; {ranks_in_words(ranks)}"


def collect_notes(timelines: Timelines) -> tuple[Noted, ...]:
    """Collect the findings of all ranks by code, in order of first appearance."""
    found: dict[str, list[tuple[int, Remark]]] = {}
    remarks = entries_of(timelines, Remark)
    for rank, remark in sorted(remarks, key=lambda pair: pair[1].time_seconds):
        found.setdefault(remark.finding.code, []).append((rank, remark))
    how_bad = attrgetter("severity", "amount")
    return tuple(
        Noted(
            number=number,
            finding=max((remark.finding for _, remark in each), key=how_bad),
            moments=tuple(each),
        )
        for number, each in enumerate(found.values(), start=1)
    )


def spans_of(entries: Iterable[Entry], during: Duration) -> tuple[list[Span], list[Key]]:
    """Shade evaluations, generations and saves, and draw releases of the cache as strokes.

    The keys name the colours, with the number of readings of each.
    """
    spans: dict[tuple[str, int], Span] = {}
    counts = Counter[str]()
    before, released, times = 0.0, 0, 0
    for entry in entries:
        if isinstance(entry, Flush):
            at, key = during.since(entry.time_seconds), ("flush", during.place(entry.time_seconds))
            spans[key] = Span(begin=at, end=at, colour="flush")
            released, times = released + entry.released_bytes, times + entry.num_releases
        if not isinstance(entry, Sample):
            continue
        until = during.since(entry.time_seconds)
        if entry.moment not in _TRAINING:
            key = (entry.moment, during.place(entry.time_seconds))
            begin = spans[key].begin if key in spans else before
            spans[key] = Span(begin=begin, end=until, colour=colour_of(entry.moment))
            counts[entry.moment] += entry.num_readings
        before = until
    keys = [Key(name=f"{name} ({num:,})", colour=colour_of(name)) for name, num in counts.items()]
    if times:
        keys.append(Key(name=f"cache released ({times:,})", colour="flush", text=size(released)))
    return [*spans.values()], keys


def marks_of(entries: Iterable[Entry], noted: Iterable[Noted], during: Duration) -> Iterator[Mark]:
    """Mark the errors of one rank, and the findings of all, each with its number in the list."""
    for entry in entries:
        if isinstance(entry, Failure):
            title = f"step {entry.step}: {entry.words}"
            at = during.since(entry.time_seconds)
            yield Mark(at=at, colour="error", text="✕", title=title)
    for each in noted:
        marks = {
            during.place(remark.time_seconds): Mark(
                at=during.since(remark.time_seconds),
                colour=remark.finding.severity.name.lower(),
                title=f"rank {rank}, step {remark.step}: {remark.finding.summary}",
                text=str(each.number),
                href=f"#finding-{each.number}",
            )
            for rank, remark in each.moments
        }
        yield from marks.values()
