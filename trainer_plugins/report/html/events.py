"""Events: what happened when in a run, as lanes under a chart of its memory."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trainer_plugins.finding import Finding, Severity
from trainer_plugins.record.timeline import Entry, Failure, Flush, Remark, Sample
from trainer_plugins.report.html.chart import Lane, Sign, percent_of
from trainer_plugins.report.html.colours import colour_of
from trainer_plugins.report.html.scales import WIDTH
from trainer_plugins.units import size

_AT_ONCE = 200  # signs of one kind in a lane


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Holds the time that all charts of a run share."""

    began_seconds: float
    """Since the Unix epoch."""

    seconds: float

    def place(self, seconds: float) -> float:
        """Return where a time since the beginning lies, in units of the chart."""
        return round(WIDTH * min(max(seconds / self.seconds, 0.0), 1.0), 1)

    def percent(self, time_seconds: float) -> float:
        """Return where a time since the epoch lies."""
        return percent_of(self.place(time_seconds - self.began_seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """Holds a finding with all moments at which the ranks noted it; the worst one speaks."""

    number: int
    finding: Finding
    moments: tuple[tuple[int, Remark], ...]
    """Rank and remark, in the order of time."""

    @property
    def where(self) -> str:
        """Say in which steps and on which ranks."""
        steps = sorted({remark.step for _, remark in self.moments})
        ranks = sorted({rank for rank, _ in self.moments})
        shown = ", ".join(map(str, steps[:8])) + " ..." * (len(steps) > 8)
        one = "step" if len(steps) == 1 else "steps"
        return f"{one} {shown}; {'rank' if len(ranks) == 1 else 'ranks'} {_listed(ranks)}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + f" and {len(ranks) - 8} more" * (len(ranks) > 8)


def noted_in(timelines: Mapping[int, Sequence[Entry]]) -> tuple[Noted, ...]:
    """Collect the findings of all ranks by code, in the order in which they first came."""
    found: dict[str, list[tuple[int, Remark]]] = {}
    remarks = [
        (rank, entry)
        for rank, entries in timelines.items()
        for entry in entries
        if isinstance(entry, Remark)
    ]
    for rank, remark in sorted(remarks, key=lambda pair: pair[1].time_seconds):
        found.setdefault(remark.finding.code, []).append((rank, remark))
    return tuple(
        Noted(
            number=number,
            finding=max(
                (remark.finding for _, remark in each),
                key=lambda finding: (finding.severity, finding.amount),
            ),
            moments=tuple(each),
        )
        for number, each in enumerate(found.values(), start=1)
    )


def lanes_of(entries: Sequence[Entry], span: Span, noted: Iterable[Noted]) -> tuple[Lane, ...]:
    """Show what one rank did, when its cache was given back, how it failed, and all findings."""
    return (
        *_moments(entries, span),
        *_releases(entries, span),
        *_failures(entries, span),
        *_findings(noted, span),
    )


def lane_key(entries: Sequence[Entry]) -> tuple[tuple[str, str], ...]:
    """Name the colours of what a rank did, with how often it was read."""
    counts: dict[str, int] = {}
    for entry in entries:
        if isinstance(entry, Sample) and entry.moment not in ("begin", "end"):
            counts[entry.moment] = counts.get(entry.moment, 0) + entry.num_readings
    keys = [(f"{name} ({num:,})", colour_of(name)) for name, num in counts.items()]
    if any(isinstance(entry, Flush) for entry in entries):
        keys.append(("cache given back", "c-flush"))
    return tuple(keys)


def _moments(entries: Iterable[Entry], span: Span) -> list[Lane]:
    """Show what the run did when; what is too short to be seen is drawn a little wider."""
    signs: dict[tuple[str, int], Sign] = {}
    before = 0.0
    for entry in entries:
        if not isinstance(entry, Sample) or entry.moment in ("begin", "end"):
            before = span.percent(entry.time_seconds) if isinstance(entry, Sample) else before
            continue
        until = span.percent(entry.time_seconds)
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
    """Show when the cache was given back; neighbours are one sign."""
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
            title=f"cache given back {sum(each.num_releases for each in some)} times until step"
            f" {some[-1].step}: {size(sum(each.released_bytes for each in some))}",
        )
        for some in together.values()
    ]
    return [Lane(name="flush", signs=tuple(signs))] if signs else []


def _failures(entries: Iterable[Entry], span: Span) -> list[Lane]:
    return [
        _labelled(
            [
                Sign(
                    at_percent=span.percent(entry.time_seconds),
                    colour="c-error",
                    title=f"step {entry.step}: {entry.words}",
                    text="✕",
                )
            ],
            f"{'out of memory' if entry.record else 'failed'} after step {entry.step}",
        )
        for entry in entries
        if isinstance(entry, Failure)
    ]


_SEVERITIES = {Severity.INFO: "c-info", Severity.WARNING: "c-warning", Severity.ERROR: "c-error"}


def _findings(noted: Iterable[Noted], span: Span) -> list[Lane]:
    return [
        _labelled(
            [
                Sign(
                    at_percent=span.percent(remark.time_seconds),
                    colour=_SEVERITIES[remark.finding.severity],
                    title=f"rank {rank}, step {remark.step}: {remark.finding.summary}",
                    text=str(each.number),
                    href=f"#finding-{each.number}",
                )
                for rank, remark in {
                    int(span.percent(remark.time_seconds) * _AT_ONCE / 100): (rank, remark)
                    for rank, remark in each.moments
                }.values()
            ],
            each.finding.code,
        )
        for each in noted
    ]


def _labelled(signs: Sequence[Sign], label: str) -> Lane:
    """Put a label where no sign of the lane is, even if the page is narrow."""
    first, last = signs[0].at_percent, signs[-1].at_percent
    side: Literal["left", "right", "above"] = (
        "left" if first > 42 else "right" if last < 58 else "above"
    )
    at = {"left": first, "right": last, "above": 0.0}[side]
    return Lane(name="", signs=tuple(signs), label=label, label_percent=at, side=side)
