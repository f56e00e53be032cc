"""Renders a plan as one web page, which loads nothing and shows the same figures as the JSON."""

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import jinja2

from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.report.plan import details, host_verdict, verdict
from trainer_plugins.report.words import words_of
from trainer_plugins.units import GIB, MIB, percent, size

_TEMPLATE = Path(__file__).with_name("plan.html.jinja")
_WIDTH, _HEIGHT = 900.0, 300.0
_TICKS_AT_MOST = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Holds the timeline as shapes, in units of its view box; y grows downwards, as in SVG."""

    width: float
    height: float
    allocated: str
    """The outline of an area, as an SVG path."""

    reserved: str
    """A line, as an SVG path."""

    moments: tuple[tuple[str, float], ...]
    """Name and left edge of each moment; all are equally wide."""

    moment_width: float

    ticks: tuple[tuple[str, float], ...]
    capacity: tuple[str, float] | None
    """What the process can reserve of the card, as text, and its height."""

    peak: tuple[float, float]


def plan_page(plan: MemoryPlan) -> str:
    """Render the whole page; sizes are `data` elements whose value is the exact number of bytes."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"size": size, "percent": percent, "words": words_of}
    page = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return page.render(
        plan=plan,
        verdict=verdict(plan),
        details=details(plan),
        host=host_verdict(plan),
        chart=chart_of(plan),
    )


def chart_of(plan: MemoryPlan) -> Chart | None:
    """Draw the timeline; None if the plan has none."""
    if not plan.timeline:
        return None
    limit = plan.capacity_bytes - plan.context_bytes if plan.capacity_bytes is not None else None
    highest = max(max(allocated, reserved) for _, allocated, reserved in plan.timeline)
    top = 1.05 * max(highest, limit or 0, 1)
    moments = [
        (name, [*points]) for name, points in groupby(plan.timeline, key=lambda point: point[0])
    ]
    width = _WIDTH / len(moments)

    def height_of(num_bytes: float) -> float:
        return round(_HEIGHT * (1 - num_bytes / top), 2)

    allocated, reserved, peak = "", "", (0.0, _HEIGHT)
    for number, (_, points) in enumerate(moments):
        for position, (_, now, held) in enumerate(points):
            begin, end = (
                round((number + (position + at) / len(points)) * width, 2) for at in (0, 1)
            )
            allocated += f" H{begin} V{height_of(now)} H{end}"
            down = "V" if reserved else ""
            reserved += f" {'H' if reserved else 'M'}{begin} {down}{height_of(held)} H{end}"
            peak = min(peak, (begin, height_of(now)), key=lambda point: point[1])
    every = _between_ticks(top)
    ticks = [every * number for number in range(int(top / every) + 1)]
    return Chart(
        width=_WIDTH,
        height=_HEIGHT,
        allocated=f"M0 {_HEIGHT}{allocated} V{_HEIGHT} Z",
        reserved=reserved.strip(),
        moments=tuple((name, round(number * width, 2)) for number, (name, _) in enumerate(moments)),
        moment_width=round(width, 2),
        ticks=tuple((size(tick) if tick else "0", height_of(tick)) for tick in ticks),
        capacity=(size(limit), height_of(limit)) if limit is not None else None,
        peak=peak,
    )


def _between_ticks(top: float) -> int:
    """Return 1, 2 or 5 times a power of ten, in the unit that sizes of this height have."""
    unit = GIB if top >= GIB else MIB
    every, factors = unit, (2.0, 2.5, 2.0)
    number = 0
    while top / every > _TICKS_AT_MOST:
        every = int(every * factors[number % len(factors)])
        number += 1
    return every
