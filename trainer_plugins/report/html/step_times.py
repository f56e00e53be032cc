"""Draw the step times of a rank, and its tokens or rows per second."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import median
from typing import Literal

from trainer_plugins.record.timeline import Entry, Sample
from trainer_plugins.report.html.chart import Chart, ChartLine, Dot, Table, seconds_text
from trainer_plugins.report.html.events import Duration
from trainer_plugins.report.html.memory import MOST, MOST_ROWS, Stretch, group
from trainer_plugins.report.summary import steps_in_words

_FEWEST = 3
_FAR = 8  # a step this many times longer than usual would flatten the picture


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes(Stretch):
    """Holds the duration of consecutive steps."""

    num_steps: int
    busy_seconds: float  # the time of these steps, without evaluations and saves between them
    slowest_seconds: float
    slowest_step: int
    num_tokens: int  # tokens of these steps on all ranks; 0 if not counted

    @property
    def mean_seconds(self) -> float:
        return self.busy_seconds / self.num_steps


def paces_of(entries: Iterable[Entry], began_seconds: float, most: int = MOST) -> list[StepTimes]:
    """Measure the steps of one rank between its readings, joined into stretches."""
    return [_join(some) for some in group([*_paces(entries, began_seconds)], most)]


def _join(some: Sequence[StepTimes]) -> StepTimes:
    return replace(
        max(some, key=attrgetter("slowest_seconds")),
        began_seconds=some[0].began_seconds,
        ended_seconds=some[-1].ended_seconds,
        last_step=some[-1].last_step,
        num_steps=sum(each.num_steps for each in some),
        busy_seconds=sum(each.busy_seconds for each in some),
        num_tokens=sum(each.num_tokens for each in some),
    )


def _paces(entries: Iterable[Entry], began_seconds: float) -> Iterator[StepTimes]:
    """Yield the steps: each lasts from the reading before it, so evaluations do not count."""
    before: Sample | None = None
    for entry in entries:
        if not isinstance(entry, Sample) or entry.moment == "generate":
            continue  # a generation is part of the step, or of the evaluation, that follows it
        if entry.moment == "train" and before is not None:
            seconds, num = entry.time_seconds - before.time_seconds, entry.step - before.step
            if seconds > 0 and num > 0:
                yield StepTimes(
                    began_seconds=before.time_seconds - began_seconds,
                    ended_seconds=entry.time_seconds - began_seconds,
                    num_steps=num,
                    last_step=entry.step,
                    busy_seconds=seconds,
                    slowest_seconds=seconds / num,
                    slowest_step=entry.step,
                    num_tokens=max(0, entry.num_tokens_seen - before.num_tokens_seen),
                )
        before = entry


def pace_chart(rank: int, entries: Sequence[Entry], during: Duration) -> Chart | None:
    """Draw step times; None if fewer than three were read."""
    found = paces_of(entries, during.began_seconds)
    if len(found) < _FEWEST:
        return None
    means = [each.mean_seconds for each in found]
    slowest = max(found, key=attrgetter("slowest_seconds"))
    lines = [("mean", "pace", means)]
    if any(each.num_steps > 1 for each in found):
        lines.insert(0, ("slowest", "slow", [each.slowest_seconds for each in found]))
    longest = f"{seconds_text(slowest.slowest_seconds)}, in step {slowest.slowest_step}"

    def cells(each: StepTimes) -> tuple[str, str]:
        return seconds_text(each.mean_seconds), seconds_text(each.slowest_seconds)

    return _chart(
        f"pace-{rank}",
        f"A step took {seconds_text(median(means))}, and at most {longest}",
        "s",
        found,
        lines,
        _table(entries, during, ("mean", "slowest"), cells),
    )


def rate_chart(
    rank: int, entries: Sequence[Entry], during: Duration, num_rows_a_step: int
) -> Chart | None:
    """Draw the tokens per second of all ranks, or the rows; None if neither is known."""
    found = paces_of(entries, during.began_seconds)
    has_tokens = any(each.num_tokens for each in found)
    if len(found) < _FEWEST or not (has_tokens or num_rows_a_step):
        return None
    what = "tokens" if has_tokens else "rows"

    def count(each: StepTimes) -> int:
        return each.num_tokens if has_tokens else each.num_steps * num_rows_a_step

    def cells(each: StepTimes) -> tuple[str, str]:
        return f"{count(each):,}", _number(count(each) / each.busy_seconds)

    rates = [count(each) / each.busy_seconds for each in found]
    mean = sum(map(count, found)) / sum(each.busy_seconds for each in found)
    by = "as the Trainer counts them" if has_tokens else f"{num_rows_a_step:,} of each step"
    return _chart(
        f"rate-{rank}",
        f"{_number(mean)} {what} a second on all ranks, {by}",
        "/s",
        found,
        [(f"{what} a second", "pace", rates)],
        _table(entries, during, (what, "a second"), cells),
    )


def _table(
    entries: Sequence[Entry],
    during: Duration,
    heads: tuple[str, str],
    cells: Callable[[StepTimes], tuple[str, str]],
) -> Table:
    rows = (
        (seconds_text(each.ended_seconds), str(each.num_steps), *cells(each))
        for each in paces_of(entries, during.began_seconds, MOST_ROWS)
    )
    return Table(head=("until", "steps", *heads), rows=tuple(rows))


def _chart(
    name: str,
    title: str,
    unit: Literal["s", "/s"],
    found: Sequence[StepTimes],
    lines: Sequence[tuple[str, str, Sequence[float]]],
    table: Table,
) -> Chart:
    """Draw lines over time, with gaps during other work: an evaluation, a save.

    The first line has the highest value, which is marked; the last one is the usual.
    """
    edges, said, steps = [0.0], list[str](), list[int]()
    values: list[list[float | None]] = [[] for _ in lines]
    for number, each in enumerate(found):
        begin, end = round(each.began_seconds, 3), round(each.ended_seconds, 3)
        if begin > edges[-1]:
            edges.append(begin)
            said.append("between steps")
            steps.append(each.last_step - each.num_steps)
            for drawn in values:
                drawn.append(None)
        edges.append(end)
        steps.append(each.last_step)
        words = steps_in_words(each.last_step - each.num_steps + 1, each.last_step)
        said.append(f"{words}, {seconds_text(each.ended_seconds)}")
        for drawn, (*_, some) in zip(values, lines, strict=True):
            drawn.append(float(f"{some[number]:.4g}"))
    peak = _peak(found, lines[0][2], _FAR * median(lines[-1][2]), unit)
    return Chart(
        name=name,
        title=title,
        pixels=80,
        unit=unit,
        axis="seconds",
        top=1.3 * peak.value,
        dot=peak,
        edges=edges,
        steps=steps,
        lines=[
            ChartLine(name=line, colour=colour, values=drawn)
            for (line, colour, _), drawn in zip(lines, values, strict=True)
        ],
        said=said,
        table=table,
    )


def _peak(found: Sequence[StepTimes], values: Sequence[float], edge: float, unit: str) -> Dot:
    """Mark the highest value; one that would flatten the rest is written at the edge."""
    highest = max(values)
    pace = found[values.index(highest)]
    text = seconds_text(highest) if unit == "s" else _number(highest)
    return Dot(
        at=(pace.began_seconds + pace.ended_seconds) / 2,
        value=min(highest, edge),
        text=text if highest <= edge else f"↑ {text}",
    )


def _number(rate: float) -> str:
    """Render a rate for people: three digits, or all of a larger whole number.

    >>> _number(0.1234), _number(5.678), _number(12345.6)
    ('0.123', '5.68', '12,346')
    """
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
