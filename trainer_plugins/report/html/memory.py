"""Draws what a rank did with its memory."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter

from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.timeline import Entry, Failure, Sample
from trainer_plugins.report.html.chart import (
    AxisRow,
    Band,
    Chart,
    Dot,
    Height,
    Limit,
    Table,
    areas,
    byte_ticks,
    height_of,
    limited,
    percent_of,
    seconds_text,
    stacked,
    stairs,
    time_ticks,
)
from trainer_plugins.report.html.events import Noted, Span, lane_key, lanes_of
from trainer_plugins.report.summary import steps_in_words
from trainer_plugins.units import percent, size

MOST = 240  # a picture of a thousand pixels shows no more
_PIXELS, _SMALL_PIXELS = 260, 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Holds the highest figures of readings in a row; each covers all since the one before."""

    began_seconds: float
    ended_seconds: float  # since the beginning of the picture
    first_step: int
    last_step: int
    moments: tuple[str, ...]
    outside_bytes: int  # memory outside torch; the next three include it
    kept_bytes: int  # with the tensors that were alive when it was read
    peak_bytes: int  # with the most that tensors took at once
    used_bytes: int  # with the cache
    peak_allocated_bytes: int
    reserved_bytes: int


def stretches_of(entries: Iterable[Entry], began_seconds: float, most: int = MOST) -> list[Stretch]:
    """Join the readings of one rank to no more than `most` stretches, long enough to be seen."""
    alone = [*_alone(entries, began_seconds)]
    if not alone:
        return []
    shortest = alone[-1].ended_seconds / most
    joined: list[Stretch] = []
    waiting: list[Stretch] = []
    for each in alone:
        waiting.append(each)
        if each.ended_seconds - waiting[0].began_seconds >= shortest:
            joined.append(_joined(waiting))
            waiting = []
    if waiting:
        joined[-1:] = [_joined([*joined[-1:], *waiting])]
    return joined


def _alone(entries: Iterable[Entry], began_seconds: float) -> Iterator[Stretch]:
    before = 0.0
    for entry in entries:
        if not isinstance(entry, Sample):
            continue
        reading, outside = entry.reading, entry.reading.non_torch_bytes
        peak = outside + max(reading.peak_allocated_bytes, reading.allocated_bytes)
        until = max(before, entry.time_seconds - began_seconds)  # a clock may be set back
        yield Stretch(
            began_seconds=before,
            ended_seconds=until,
            first_step=entry.step,
            last_step=entry.step,
            moments=(entry.moment,),
            outside_bytes=outside,
            kept_bytes=outside + reading.allocated_bytes,
            peak_bytes=peak,
            used_bytes=max(peak, outside + reading.reserved_bytes),
            peak_allocated_bytes=reading.peak_allocated_bytes,
            reserved_bytes=reading.reserved_bytes,
        )
        before = until


def _joined(some: Sequence[Stretch]) -> Stretch:
    sizes = [each.name for each in fields(Stretch) if each.name.endswith("_bytes")]
    return replace(
        some[0],
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
    span: Span,
    noted: Sequence[Noted],
    planned: Mapping[str, int],
) -> Chart | None:
    """Draw one rank, and the planned peak of each moment; None if it has no readings."""
    found, top = stretches_of(entries, span.began_seconds), fullest(entries)
    if not found or top is None:
        return None
    reading = top.reading
    highest = max(*(each.used_bytes for each in found), *planned.values(), 1)
    height = height_of(highest, reading.total_bytes, _PIXELS)
    unit, ticks = byte_ticks(height)
    edges, rows = _edges(found, span), tuple(map(_row, found))
    peak = max(found, key=lambda each: each.peak_bytes)
    at = percent_of(span.place((peak.began_seconds + peak.ended_seconds) / 2))
    y, limit_y = height.y(peak.peak_bytes), height.y(reading.total_bytes)
    words = f"the card: {size(reading.total_bytes)}"
    limit, line = limited(height, reading.total_bytes, words, highest, is_left=at > 50)
    return Chart(
        name=f"memory-{rank}",
        title=f"{reading.device}: {size(peak.peak_bytes)} of {size(reading.total_bytes)} in use at"
        f" the peak, in step {top.step}",
        description="What was in use over the time of the run. The table below has all figures.",
        pixels=_PIXELS,
        unit=unit,
        ticks=ticks,
        bands=(
            *line,
            *stacked(edges, _levels(found), _named(reading), height),
            *_planned(edges, found, planned, height),
        ),
        times=times_under(span, found),
        lines_percent=_failures(entries, span),
        limit=limit,
        dot=Dot(
            at_percent=at,
            y=y,
            text=f"{size(peak.peak_bytes)}, {percent(peak.peak_bytes / reading.total_bytes)}",
            text_y=limit_y - 6 if -4 < y - 10 - limit_y < 14 else y - 10,  # no line through it
        ),
        lanes=lanes_of(entries, span, noted),
        lane_key=lane_key(entries),
        edges=edges,
        titles=[
            f"{until}, {steps}, {moments}: {tensors} in tensors at the peak"
            for until, steps, moments, tensors, *_ in rows
        ],
        table=Table(head=_HEAD, rows=rows),
    )


def small_chart(rank: int, entries: Sequence[Entry], span: Span, num_ranks: int) -> Chart | None:
    """Draw one rank of many: the memory in use, below the limit of its card."""
    found = stretches_of(entries, span.began_seconds, max(40, MOST // num_ranks))
    top = fullest(entries)
    if not found or top is None:
        return None
    reading = top.reading
    highest = max(1.05 * reading.total_bytes, *(each.peak_bytes for each in found))
    height, edges = Height(highest, _SMALL_PIXELS), _edges(found, span)
    words = f"rank {rank}: {size(reading.peak_allocated_bytes)}, {percent(reading.pressure)} full"
    return Chart(
        name=f"rank-{rank}",
        title=words,
        description=f"In {top.moment}, step {top.step}, on {reading.device}.",
        pixels=_SMALL_PIXELS,
        unit="",
        ticks=(),
        bands=stacked(edges, _levels(found)[:3], _named(reading)[:3], height),
        limit=Limit(y=height.y(reading.total_bytes), text="", is_left=False),
        lines_percent=_failures(entries, span),
    )


def _failures(entries: Iterable[Entry], span: Span) -> tuple[float, ...]:
    return tuple(span.percent(each.time_seconds) for each in entries if isinstance(each, Failure))


_HEAD = ("until", "steps", "moment", "tensors at the peak", "with others", "reserved", "outside")


def _edges(found: Sequence[Stretch], span: Span) -> list[float]:
    times = [*(each.began_seconds for each in found), found[-1].ended_seconds]
    return [*map(span.place, times)]


def _row(each: Stretch) -> tuple[str, ...]:
    return (
        seconds_text(each.ended_seconds),
        steps_in_words(each.first_step, each.last_step),
        ", ".join(each.moments),
        size(each.peak_allocated_bytes),
        size(each.peak_bytes),
        size(each.reserved_bytes),
        size(each.outside_bytes),
    )


def _levels(found: Sequence[Stretch]) -> list[tuple[int, ...]]:
    figures = attrgetter("outside_bytes", "kept_bytes", "peak_bytes", "used_bytes")
    return [*zip(*map(figures, found), strict=True)]


def _named(reading: MemoryReading) -> list[tuple[str, str, str]]:
    peak, kept = reading.peak_allocated_bytes, reading.allocated_bytes
    return areas(reading.non_torch_bytes, kept, peak, reading.reserved_bytes)


def _planned(
    edges: Sequence[float], found: Sequence[Stretch], planned: Mapping[str, int], height: Height
) -> tuple[Band, ...]:
    if not planned:
        return ()
    levels = [
        max((planned[moment] for moment in each.moments if moment in planned), default=None)
        for each in found
    ]
    path = stairs(edges, levels, height)
    return (Band(name="planned peak", colour="c-planned", path=path, is_line=True),)


def times_under(span: Span, found: Sequence[Stretch]) -> tuple[AxisRow, AxisRow]:
    """Write times under the picture, and how many steps were complete by then."""
    times, steps = [], []
    for seconds, text in time_ticks(span.seconds):
        complete = [each.last_step for each in found if each.ended_seconds <= seconds]
        place = percent_of(span.place(seconds))
        times.append((place, text))
        steps.append((place, str(max(complete, default=found[0].first_step))))
    return ("time", tuple(times)), ("step", tuple(steps))
