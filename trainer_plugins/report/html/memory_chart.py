"""Draw a rank's use of memory, and the time of its steps."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from statistics import median_low
from typing import Any, NamedTuple

from trainer_plugins.printable import printable
from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.timeline import Entry, Failure, Sample
from trainer_plugins.report.html.chart import Chart, ChartLine, Dot, areas_of_card, draw_limit
from trainer_plugins.report.html.events import Duration, Noted, marks_of, spans_of
from trainer_plugins.report.pace import StepTimes, describe_pace, paces_of, seconds_text
from trainer_plugins.report.summary import steps_in_words
from trainer_plugins.units import percent, size

_MOST = 1500  # readers can zoom in
_FAR = 8  # a step this many times longer than usual would flatten the picture
_ALIKE_FRACTION = 0.1  # ranks whose peaks are within this fraction of each other are alike


class MemoryUse(NamedTuple):
    """Holds the highest figures of consecutive readings; each covers all since the one before."""

    began_seconds: float  # since the beginning of the picture, as the next one
    ended_seconds: float
    first_step: int
    last_step: int
    moments: tuple[str, ...]
    outside_bytes: int  # memory outside torch; the next three include it
    kept_bytes: int  # plus the tensors alive at the reading
    peak_bytes: int  # plus the peak of tensors
    used_bytes: int  # plus the cache


def stretches_of(
    entries: Iterable[Entry], began_seconds: float, most: int = _MOST
) -> list[MemoryUse]:
    """Join the readings of one rank into about `most` stretches, each long enough to be visible."""
    alone = [*_alone(entries, began_seconds)]
    shortest = alone[-1].ended_seconds / most if alone else 0.0
    groups: list[list[MemoryUse]] = []
    for each in alone:
        if not groups or groups[-1][-1].ended_seconds - groups[-1][0].began_seconds >= shortest:
            groups.append([])
        groups[-1].append(each)
    return [*map(_join, groups)]


def _alone(entries: Iterable[Entry], began_seconds: float) -> Iterator[MemoryUse]:
    before = 0.0
    for entry in entries:
        if not isinstance(entry, Sample):
            continue
        reading, outside = entry.reading, entry.reading.non_torch_bytes
        peak = outside + max(reading.peak_allocated_bytes, reading.allocated_bytes)
        until = max(before, entry.time_seconds - began_seconds)  # a clock may be set back
        yield MemoryUse(
            began_seconds=before,
            ended_seconds=until,
            first_step=entry.step,
            last_step=entry.step,
            moments=(entry.moment,),
            outside_bytes=outside,
            kept_bytes=outside + reading.allocated_bytes,
            peak_bytes=peak,
            used_bytes=max(peak, outside + reading.reserved_bytes),
        )
        before = until


def _join(some: Sequence[MemoryUse]) -> MemoryUse:
    sizes = [name for name in MemoryUse._fields if name.endswith("_bytes")]
    return some[0]._replace(
        ended_seconds=some[-1].ended_seconds,
        last_step=some[-1].last_step,
        moments=tuple(dict.fromkeys(moment for each in some for moment in each.moments)),
        **{name: max(getattr(each, name) for each in some) for name in sizes},
    )


def fullest(entries: Iterable[Entry]) -> Sample | None:
    """Return the reading with the highest pressure; None if there is none."""
    samples = (entry for entry in entries if isinstance(entry, Sample))
    return max(samples, key=lambda sample: sample.reading.pressure, default=None)


def memory_chart(
    rank: int,
    entries: Sequence[Entry],
    during: Duration,
    noted: Sequence[Noted],
    planned: Mapping[str, int],
) -> Chart | None:
    """Draw one rank, and the planned peak of each moment; None if it has no readings."""
    found, top = stretches_of(entries, during.began_seconds), fullest(entries)
    if not found or top is None:
        return None
    reading = top.reading
    highest = max(*(each.used_bytes for each in found), *planned.values(), 1)
    peak = max(found, key=lambda each: each.peak_bytes)
    scale, limit, key = draw_limit(highest, reading.total_bytes)
    spans, keys = spans_of(entries, during)
    return Chart(
        name=f"memory-{rank}",
        title=f"Rank {rank} on {reading.device}: {size(peak.peak_bytes)} of"
        f" {size(reading.total_bytes)} in use at the peak, in step {top.step}",
        pixels=260,
        top=scale,
        areas=_areas(found, reading),
        lines=_draw_planned(found, planned),
        **_along_time(found),
        hint="Point at a moment. Drag to zoom; keys: + - 0, arrows, f.",
        limit=limit,
        dot=Dot(
            at=(peak.began_seconds + peak.ended_seconds) / 2,
            value=peak.peak_bytes,
            text=f"{size(peak.peak_bytes)}, {percent(peak.peak_bytes / reading.total_bytes)}",
        ),
        uprights=_failures(entries, during),
        spans=spans,
        marks=[*marks_of(entries, noted, during)],
        others=(*key, *keys),
    )


def pace_chart(
    rank: int, entries: Sequence[Entry], during: Duration, num_rows_a_step: int
) -> Chart | None:
    """Draw the time of a step, with gaps during other work; None if too few were read."""
    paces = [*paces_of(entries)]
    title = describe_pace(paces, num_rows_a_step)
    if not title:
        return None
    found = stretches_of(entries, during.began_seconds)
    ends = [each.ended_seconds for each in found]
    inside: list[list[StepTimes]] = [[] for _ in found]
    for pace in paces:
        at = bisect_left(ends, pace.ended_seconds - during.began_seconds)
        inside[min(at, len(ends) - 1)].append(pace)
    values = [
        sum(each.busy_seconds for each in some) / sum(each.num_steps for each in some)
        if some
        else None
        for some in inside
    ]
    highest = max(filter(None, values))
    edge = min(highest, _FAR * median_low(filter(None, values)))
    peak = found[values.index(highest)]
    return Chart(
        name=f"pace-{rank}",
        title=title,
        pixels=80,
        unit="s",
        top=1.3 * edge,
        dot=Dot(
            at=(peak.began_seconds + peak.ended_seconds) / 2,
            value=edge,
            text=f"{'' if edge == highest else '↑ '}{seconds_text(highest)}",
        ),
        lines=[ChartLine(name="a step", colour="pace", values=values)],
        **_along_time(found),
    )


def small_chart(
    rank: int, entries: Sequence[Entry], during: Duration, num_ranks: int
) -> Chart | None:
    """Draw one rank of many: the memory in use, below the limit of its card."""
    found = stretches_of(entries, during.began_seconds, max(40, _MOST // num_ranks))
    top = fullest(entries)
    if not found or top is None:
        return None
    reading = top.reading
    return Chart(
        name=f"rank-{rank}",
        title=f"rank {rank}: {size(reading.peak_allocated_bytes)}, {percent(reading.pressure)}"
        f" full, in {top.moment}, step {top.step}, on {reading.device}",
        pixels=60,
        top=max(1.05 * reading.total_bytes, *(each.peak_bytes for each in found)),
        areas=_areas(found, reading)[:3],
        **_along_time(found),
        limit=Dot(value=reading.total_bytes, text=""),
        uprights=_failures(entries, during),
    )


def odd_one(timelines: Mapping[int, Sequence[Entry]]) -> str:
    """Name the rank whose peak is furthest from the usual one; empty if all are alike."""
    peaks = {
        rank: top.reading.peak_allocated_bytes
        for rank, entries in timelines.items()
        if (top := fullest(entries)) is not None
    }
    if len(peaks) < 2:
        return ""
    usual = median_low(peaks.values())
    rank = max(peaks, key=lambda rank: abs(peaks[rank] - usual))
    if abs(peaks[rank] - usual) <= _ALIKE_FRACTION * usual:
        return ""
    return f"Rank {rank} differs: {size(peaks[rank])} at its peak, where most have {size(usual)}."


def _failures(entries: Iterable[Entry], during: Duration) -> tuple[float, ...]:
    return tuple(during.since(each.time_seconds) for each in entries if isinstance(each, Failure))


def _along_time(found: Sequence[MemoryUse]) -> dict[str, Any]:
    """Return the axis of a picture, and the stretches between its edges."""
    edges = [*(each.began_seconds for each in found), found[-1].ended_seconds]
    said = [
        f"{steps_in_words(each.first_step, each.last_step)},"
        f" {', '.join(map(printable, each.moments))}, {seconds_text(each.ended_seconds)}"
        for each in found
    ]
    return {
        "edges": [round(edge, 3) for edge in edges],
        "steps": [each.last_step for each in found],
        "said": said,
    }


def _areas(found: Sequence[MemoryUse], reading: MemoryReading) -> list[ChartLine]:
    figures = attrgetter("outside_bytes", "kept_bytes", "peak_bytes", "used_bytes")
    levels = [*zip(*map(figures, found), strict=True)]
    peak, kept = reading.peak_allocated_bytes, reading.allocated_bytes
    return areas_of_card(levels, reading.non_torch_bytes, kept, peak, reading.reserved_bytes)


def _draw_planned(found: Sequence[MemoryUse], planned: Mapping[str, int]) -> tuple[ChartLine, ...]:
    if not planned:
        return ()
    levels = [
        max((planned[moment] for moment in each.moments if moment in planned), default=None)
        for each in found
    ]
    return (ChartLine(name="planned peak", colour="planned", values=levels, dashed=True),)
