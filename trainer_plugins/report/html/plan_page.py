"""Render a plan as a page: the verdict, changes that would fit, and the memory of each moment."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby

from trainer_plugins.planner.plan import MemoryPlan, Moment
from trainer_plugins.report.html.chart import Chart, Dot, Span, areas_of_card, colour_of, draw_limit
from trainer_plugins.report.html.page import Page, page
from trainer_plugins.report.plan_text import WHEN, describe_planned, details, host_verdict, verdict
from trainer_plugins.units import size

_OF_A_STEP = ("forward", "backward", "optimizer step")
_SHORT = {"optimizer step": "optimizer"}

Stretch = tuple[Moment, list[tuple[int, int]]]  # a moment; allocated and reserved bytes


def plan_page(plan: MemoryPlan) -> Page:
    """Render the whole page; sizes are `data` elements that hold the exact number of bytes."""
    chart = plan_chart(plan)
    breakdown = sorted(plan.breakdown.items(), key=lambda pair: -pair[1])
    return page(
        "plan.html.jinja",
        {"charts": {} if chart is None else {chart.name: asdict(chart)}},
        plan=plan,
        when=WHEN,
        verdict=verdict(plan),
        details=details(plan),
        host=host_verdict(plan),
        planned=describe_planned(plan),
        chart=chart,
        breakdown=[(name, num_bytes, "") for name, num_bytes in breakdown],
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
    edges = [
        round(number + at / len(some), 4)
        for number, (_, some) in enumerate(stretches)
        for at in range(len(some))
    ]
    edges.append(len(stretches))
    used = [outside + max(point) for point in points]
    peak = max(range(len(points)), key=lambda at: points[at][0])
    top, limit, key = draw_limit(max(used), plan.capacity_bytes)
    kept = _find_kept(stretches)
    levels = [
        [outside] * len(points),
        [outside + each for each in kept],
        [outside + now for now, _ in points],
        used,
    ]
    numbers = {moment: number for number, moment in enumerate(plan.moments, start=1)}
    return Chart(
        name="plan",
        title=f"{size(plan.allocated_peak_bytes)} in tensors at the peak, {WHEN[plan.moment]}",
        pixels=260,
        axis="moments",
        top=top,
        edges=edges,
        areas=areas_of_card(levels, outside, kept[peak], *points[peak]),
        said=[moment for moment, some in stretches for _ in some],
        limit=limit,
        dot=Dot(
            at=(edges[peak] + edges[peak + 1]) / 2,
            value=outside + points[peak][0],
            text=size(points[peak][0]),
        ),
        spans=[
            Span(begin=number, end=number + 1, colour=colour_of(moment))
            for number, (moment, _) in enumerate(stretches)
        ],
        words=[
            (number + 0.5, f"{numbers.get(moment, '')} {_SHORT.get(moment, moment)}")
            for number, (moment, _) in enumerate(stretches)
        ],
        others=key,
    )


def _find_kept(stretches: Sequence[Stretch]) -> list[int]:
    """Return for each point the lowest allocated memory of its step, or of its other moment."""
    steps: list[list[int]] = []
    before = ""
    for moment, points in stretches:
        if not (moment in _OF_A_STEP[1:] and before in _OF_A_STEP):
            steps.append([])
        steps[-1] += [allocated for allocated, _ in points]
        before = moment
    return [min(step) for step in steps for _ in step]
