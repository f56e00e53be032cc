"""Renders a plan as a page: whether it fits, what would fit, and the memory of each moment."""

from collections.abc import Sequence
from itertools import groupby

from trainer_plugins.planner.plan import MemoryPlan, Moment
from trainer_plugins.report.html.chart import (
    WIDTH,
    Chart,
    Dot,
    Lane,
    Sign,
    Table,
    areas,
    byte_ticks,
    colour_of,
    height_of,
    limited,
    percent_of,
    stacked,
)
from trainer_plugins.report.html.page import Page, page
from trainer_plugins.report.plan_text import details, host_verdict, moment_of, planned, verdict
from trainer_plugins.units import size

_PIXELS = 260
_OF_A_STEP = ("forward", "backward", "optimizer step")
_WIDE_PIXELS, _LETTER_PIXELS = 900, 6.5
_SHORT = {"optimizer step": "optimizer"}

Stretch = tuple[Moment, list[tuple[int, int]]]  # a moment; allocated and reserved bytes


def plan_page(plan: MemoryPlan) -> Page:
    """Render the whole page; sizes are `data` elements whose value is the exact number of bytes."""
    breakdown = sorted(plan.breakdown.items(), key=lambda pair: -pair[1])
    return page(
        "plan.html.jinja",
        {},
        plan=plan,
        moment=moment_of(plan),
        verdict=verdict(plan),
        details=details(plan),
        host=host_verdict(plan),
        planned=planned(plan),
        chart=plan_chart(plan),
        breakdown=[(name, num_bytes, "") for name, num_bytes in breakdown],
        numbers={moment: number for number, moment in enumerate(plan.moments, start=1)},
    )


def plan_chart(plan: MemoryPlan) -> Chart | None:
    """Draw the timeline, with moments of equal width; None if the plan has none."""
    stretches = [
        (moment, [(now, held) for _, now, held in points])
        for moment, points in groupby(plan.timeline, key=lambda point: point[0])
    ]
    if not stretches:
        return None
    outside = plan.context_bytes
    points = [point for _, some in stretches for point in some]
    edges = _edges(stretches)
    used = [outside + max(point) for point in points]
    highest = max(used)
    capacity = plan.capacity_bytes
    height = height_of(highest, capacity, _PIXELS)
    unit, ticks = byte_ticks(height)
    peak = max(range(len(points)), key=lambda at: points[at][0])
    at_percent = percent_of((edges[peak] + edges[peak + 1]) / 2)
    words = f"the card: {size(capacity or 0)}"
    limit, line = limited(height, capacity, words, highest, is_left=at_percent > 50)
    y = height.y(outside + points[peak][0])
    kept = _kept(stretches)
    levels = [
        [outside] * len(points),
        [outside + each for each in kept],
        [outside + now for now, _ in points],
        used,
    ]
    names = areas(outside, kept[peak], *points[peak])
    rows = tuple(
        (moment, size(max(now for now, _ in some)), size(max(held for _, held in some)))
        for moment, some in stretches
    )
    return Chart(
        name="plan",
        title=f"{size(plan.allocated_peak_bytes)} in tensors at the peak, in the {moment_of(plan)}",
        description="Memory over the moments of a run. Training has up to three steps.",
        pixels=_PIXELS,
        unit=unit,
        ticks=ticks,
        bands=(*line, *stacked(edges, levels, names, height)),
        limit=limit,
        dot=Dot(at_percent=at_percent, y=y, text=size(points[peak][0]), text_y=y - 10),
        lanes=(_lane(stretches, plan),),
        edges=[round(WIDTH * at / len(stretches), 1) for at in range(len(stretches) + 1)],
        titles=[f"{moment}: {now} allocated, {held} reserved" for moment, now, held in rows],
        table=Table(head=("moment", "allocated", "reserved"), rows=rows),
    )


def _edges(stretches: Sequence[Stretch]) -> list[float]:
    width = WIDTH / len(stretches)
    begins = [
        round((number + at / len(some)) * width, 2)
        for number, (_, some) in enumerate(stretches)
        for at in range(len(some))
    ]
    return [*begins, WIDTH]


def _kept(stretches: Sequence[Stretch]) -> list[int]:
    """Return for each point the least that is allocated during its step, or its other moment."""
    steps: list[list[int]] = []
    before = ""
    for moment, points in stretches:
        if not (moment in _OF_A_STEP[1:] and before in _OF_A_STEP):
            steps.append([])
        steps[-1] += [allocated for allocated, _ in points]
        before = moment
    return [min(step) for step in steps for _ in step]


def _lane(stretches: Sequence[Stretch], plan: MemoryPlan) -> Lane:
    """Name each moment: by its word if all words have room, else by its number in the table."""
    width = 100 / len(stretches)
    room = _WIDE_PIXELS / len(stretches)
    words = [_SHORT.get(moment, moment) for moment, _ in stretches]
    has_room = max(map(len, words)) * _LETTER_PIXELS < room
    numbers = {moment: str(number) for number, moment in enumerate(plan.moments, start=1)}
    return Lane(
        name="",
        side="below",
        signs=tuple(
            Sign(
                at_percent=round(number * width, 2),
                width_percent=round(width, 2),
                colour=colour_of(moment),
                title=moment,
                text=numbers.get(moment, ""),
                word=word if has_room else "",
            )
            for number, ((moment, _), word) in enumerate(zip(stretches, words, strict=True))
        ),
    )
