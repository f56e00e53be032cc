"""Draws what a rank did with its memory."""

from collections.abc import Iterable, Mapping, Sequence

from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.timeline import Entry, Failure, Sample
from trainer_plugins.report.html.chart import (
    AxisRow,
    Band,
    Chart,
    Dot,
    Limit,
    Table,
    columns_of,
    height_of,
    limited,
    percent_of,
    stacked,
    stairs,
)
from trainer_plugins.report.html.events import Noted, Span, lane_key, lanes_of
from trainer_plugins.report.html.scales import Height, byte_ticks, seconds_text, time_ticks
from trainer_plugins.report.html.stretches import MOST, Stretch, stretches_of
from trainer_plugins.units import percent, size

_PIXELS, _SMALL_PIXELS = 260, 48
_NAMES = (
    ("outside torch", "c-outside"),
    ("tensors between steps", "c-kept"),
    ("more within a step", "c-within"),
    ("cache", "c-cached"),
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
    """Draw one rank in full; None if it has no readings.

    `planned` is the planned memory of the card at the peak of each moment.
    """
    found, top = stretches_of(entries, span.began_seconds), fullest(entries)
    if not found or top is None:
        return None
    reading = top.reading
    highest = max(*(each.used_bytes for each in found), *planned.values(), 1)
    height = height_of(highest, reading.total_bytes, _PIXELS)
    unit, ticks = byte_ticks(height)
    edges = _edges(found, span)
    peak = max(found, key=lambda each: each.peak_bytes)
    at = percent_of(span.place((peak.began_seconds + peak.ended_seconds) / 2))
    limit, line = limited(
        height,
        reading.total_bytes,
        f"the card: {size(reading.total_bytes)}",
        highest,
        is_left=at > 50,
    )
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
        lines_percent=tuple(
            span.percent(entry.time_seconds) for entry in entries if isinstance(entry, Failure)
        ),
        limit=limit,
        dot=_dot(at, peak, reading, height),
        lanes=lanes_of(entries, span, noted),
        lane_key=lane_key(entries),
        columns=columns_of(edges, [_words(each) for each in found]),
        table=Table(head=_HEAD, rows=tuple(_row(each) for each in found)),
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
        lines_percent=tuple(
            span.percent(entry.time_seconds) for entry in entries if isinstance(entry, Failure)
        ),
    )


_HEAD = ("until", "steps", "moment", "tensors at the peak", "with others", "reserved", "outside")


def _edges(found: Sequence[Stretch], span: Span) -> list[float]:
    return [
        *(span.place(each.began_seconds) for each in found),
        span.place(found[-1].ended_seconds),
    ]


def _row(each: Stretch) -> tuple[str, ...]:
    return (
        seconds_text(each.ended_seconds),
        each.steps,
        ", ".join(each.moments),
        size(each.peak_allocated_bytes),
        size(each.peak_bytes),
        size(each.reserved_bytes),
        size(each.outside_bytes),
    )


def _words(each: Stretch) -> str:
    until, steps, moments, tensors, *_ = _row(each)
    return f"{until}, {steps}, {moments}: {tensors} in tensors at the peak"


def _levels(found: Sequence[Stretch]) -> list[list[int]]:
    return [
        [each.outside_bytes for each in found],
        [each.kept_bytes for each in found],
        [each.peak_bytes for each in found],
        [each.used_bytes for each in found],
    ]


def _named(reading: MemoryReading) -> list[tuple[str, str, str]]:
    """Name the areas, each with its size when the card was fullest."""
    peak, kept = reading.peak_allocated_bytes, reading.allocated_bytes
    sizes = (reading.non_torch_bytes, kept, peak - kept, max(0, reading.reserved_bytes - peak))
    return [
        (name, colour, size(num_bytes))
        for (name, colour), num_bytes in zip(_NAMES, sizes, strict=True)
    ]


def _dot(at: float, peak: Stretch, reading: MemoryReading, height: Height) -> Dot:
    y, limit = height.y(peak.peak_bytes), height.y(reading.total_bytes)
    is_struck_through = -4 < y - 10 - limit < 14
    return Dot(
        at_percent=at,
        y=y,
        text=f"{size(peak.peak_bytes)}, {percent(peak.peak_bytes / reading.total_bytes)}",
        text_y=limit - 6 if is_struck_through else y - 10,
    )


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
