"""Draws the events of a run as lanes under a chart of its memory."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from trainer_plugins.finding import Finding, Severity
from trainer_plugins.record.history import Timelines, entries_of
from trainer_plugins.record.timeline import Entry, Failure, Flush, Remark, Sample
from trainer_plugins.report.html.chart import WIDTH, Lane, Sign, colour_of, percent_of
from trainer_plugins.units import size

_AT_ONCE = 200  # signs of one kind in a lane


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Holds the time that all charts of a run share."""

    began_seconds: float  # since the Unix epoch
    seconds: float

    def place(self, seconds: float) -> float:
        """Return where a time since the beginning lies, in units of the chart."""
        return round(WIDTH * min(max(seconds / self.seconds, 0.0), 1.0), 1)

    def percent(self, time_seconds: float) -> float:
        return percent_of(self.place(time_seconds - self.began_seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """Holds the worst finding of a code, with all moments at which the ranks noted one."""

    number: int
    finding: Finding
    moments: tuple[tuple[int, Remark], ...]  # rank and remark, in the order of time

    @property
    def where(self) -> str:
        steps = sorted({remark.step for _, remark in self.moments})
        ranks = sorted({rank for rank, _ in self.moments})
        return f"{_listed('step', steps)}; {_listed('rank', ranks)}"


def _listed(what: str, numbers: Sequence[int]) -> str:
    """List up to eight numbers.

    >>> _listed("step", [3]), _listed("rank", [*range(10)])
    ('step 3', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more')
    """
    shown = ", ".join(map(str, numbers[:8]))
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"{what}{'' if len(numbers) == 1 else 's'} {shown}{more}"


def noted_in(timelines: Timelines) -> tuple[Noted, ...]:
    """Collect the findings of all ranks by code, in the order in which they first came."""
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


def lanes_of(entries: Sequence[Entry], span: Span, noted: Iterable[Noted]) -> tuple[Lane, ...]:
    """Show the moments of one rank, the releases of its cache, its errors, and all findings."""
    of_rank = (*_moments(entries, span), *_releases(entries, span), *_failures(entries, span))
    return (*of_rank, *_findings(noted, span))


def lane_key(entries: Sequence[Entry]) -> tuple[tuple[str, str], ...]:
    """Name the colours of the moments, with the number of readings of each."""
    counts = Counter[str]()
    for entry in entries:
        if isinstance(entry, Sample) and entry.moment not in ("begin", "end"):
            counts[entry.moment] += entry.num_readings
    keys = [(f"{name} ({num:,})", colour_of(name)) for name, num in counts.items()]
    has_flush = any(isinstance(entry, Flush) for entry in entries)
    return (*keys, ("cache released", "c-flush")) if has_flush else tuple(keys)


def _moments(entries: Iterable[Entry], span: Span) -> list[Lane]:
    signs: dict[tuple[str, int], Sign] = {}
    before = 0.0
    for entry in entries:
        if not isinstance(entry, Sample):
            continue
        until = span.percent(entry.time_seconds)
        if entry.moment not in ("begin", "end"):
            key = (entry.moment, 0 if entry.moment == "train" else int(until * _AT_ONCE / 100))
            begin = signs[key].at_percent if key in signs else before
            signs[key] = Sign(
                at_percent=begin,
                width_percent=round(max(until - begin, 0.6), 2),
                colour=colour_of(entry.moment),
                title=f"{entry.moment}, step {entry.step}",
            )
        before = until
    ordered = sorted(signs.values(), key=lambda sign: sign.colour != "c-train")
    return [Lane(name="doing", signs=tuple(ordered))] if ordered else []


def _releases(entries: Iterable[Entry], span: Span) -> list[Lane]:
    together: dict[int, list[Flush]] = {}
    for entry in entries:
        if isinstance(entry, Flush):
            place = int(span.percent(entry.time_seconds) * _AT_ONCE / 100)
            together.setdefault(place, []).append(entry)
    signs = [
        Sign(
            at_percent=span.percent(some[-1].time_seconds),
            width_percent=0.4,
            colour="c-flush",
            title=f"cache released {sum(each.num_releases for each in some)} times until step"
            f" {some[-1].step}: {size(sum(each.released_bytes for each in some))}",
        )
        for some in together.values()
    ]
    return [Lane(name="flush", signs=tuple(signs))] if signs else []


def _failures(entries: Iterable[Entry], span: Span) -> Iterator[Lane]:
    for entry in entries:
        if isinstance(entry, Failure):
            sign = Sign(
                at_percent=span.percent(entry.time_seconds),
                colour="c-error",
                title=f"step {entry.step}: {entry.words}",
                text="✕",
            )
            what = "out of memory" if entry.record else "failed"
            yield _labelled([sign], f"{what} after step {entry.step}")


_SEVERITIES = {Severity.INFO: "c-info", Severity.WARNING: "c-warning", Severity.ERROR: "c-error"}


def _findings(noted: Iterable[Noted], span: Span) -> Iterator[Lane]:
    for each in noted:
        signs: dict[int, Sign] = {}  # the last of those that would cover each other
        for rank, remark in each.moments:
            at_percent = span.percent(remark.time_seconds)
            signs[int(at_percent * _AT_ONCE / 100)] = Sign(
                at_percent=at_percent,
                colour=_SEVERITIES[remark.finding.severity],
                title=f"rank {rank}, step {remark.step}: {remark.finding.summary}",
                text=str(each.number),
                href=f"#finding-{each.number}",
            )
        yield _labelled([*signs.values()], each.finding.code)


def _labelled(signs: Sequence[Sign], label: str) -> Lane:
    """Put a label where the lane has no sign, even if the page is narrow."""
    first, last = signs[0].at_percent, signs[-1].at_percent
    lane = Lane(name="", signs=tuple(signs), label=label, side="above")
    if first > 42:
        return replace(lane, label_percent=first, side="left")
    if last < 58:
        return replace(lane, label_percent=last, side="right")
    return lane
