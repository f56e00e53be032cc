"""Chart: what is drawn, as a value; `parts.html.jinja` makes SVG of it.

Places from left to right are percents of the width, so that text keeps its size where the page is
narrow. Paths are in units that are stretched (`scales.WIDTH`). Heights are pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from trainer_plugins.report.html.scales import WIDTH, Height, Tick, area, in_steps

_HEADROOM = 1.16
"""How much higher than the highest number a chart is, so that texts find room above it."""

_FAR = 2.5
"""A limit that is so many times what was used would press the picture flat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Holds an area or a line, and its entry in the key."""

    name: str
    colour: str
    """A class of the style sheet."""

    path: Markup
    is_line: bool = False
    note: str = ""
    """What the key says behind the name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """Marks a point, with its text above it."""

    at_percent: float
    y: float
    text: str
    text_y: float

    @property
    def anchor(self) -> str:
        """Return which end of the text is at the point, so that it stays in the picture."""
        return "start" if self.at_percent < 40 else "end" if self.at_percent > 60 else "middle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Holds a number that is not to be passed, with its text above its line."""

    y: float
    text: str
    is_left: bool
    """Whether the text stands at the left, because something else is marked at the right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """Stands at one moment of a lane."""

    at_percent: float
    width_percent: float = 0.0
    """0 is a sign without a width, such as a finding."""

    colour: str
    title: str
    text: str = ""
    word: str = ""
    """What stands instead of the text where the page is wide."""

    href: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Holds what happened under a chart, on its axis."""

    name: str
    signs: tuple[Sign, ...]
    label: str = ""
    """Text beside the first sign."""

    label_percent: float = 0.0
    side: Literal["left", "right", "above", "below"] = "right"
    """Where the label stands; above, it has a line of its own. Below, signs have texts there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Holds one stretch of a chart: its place, and its figures as words."""

    begin: float
    width: float
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Holds the figures of a chart as text."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Holds a picture with a vertical axis and a horizontal one, and what is on the latter."""

    name: str
    """Without blanks: it names the parts of the picture to each other."""

    title: str
    description: str
    pixels: int
    unit: str
    ticks: tuple[Tick, ...]
    bands: tuple[Band, ...]
    times: tuple[tuple[str, tuple[tuple[float, str], ...]], ...] = ()
    """Rows of texts under the picture: the row's name; places in percent, and texts."""

    lines_percent: tuple[float, ...] = ()
    """Where an upright line crosses the picture: an OOM."""

    limit: Limit | None = None
    dot: Dot | None = None
    lanes: tuple[Lane, ...] = ()
    lane_key: tuple[tuple[str, str], ...] = ()
    """Name and colour of what the lanes have without text."""

    columns: tuple[Column, ...] = ()
    table: Table | None = None


def stacked(
    edges: Sequence[float],
    levels: Sequence[Sequence[float]],
    names: Sequence[tuple[str, str, str]],
    height: Height,
) -> tuple[Band, ...]:
    """Draw areas on top of each other.

    Args:
        edges: where each stretch begins, and the last one ends, in units of the chart.
        levels: the upper edge of each area as a number, for each stretch; each is at least the one
            before.
        names: name, colour and note of each area; areas that are empty everywhere are left out.
        height: what a number's height is.
    """
    found, below = [], [height.y(0)] * (len(edges) - 1)
    for (name, colour, note), numbers in zip(names, levels, strict=True):
        above = [height.y(number) for number in numbers]
        if above != below:
            path = Markup(area(edges, below, above))
            found.append(Band(name=name, colour=colour, path=path, note=note))
        below = above
    return tuple(found)


def columns_of(edges: Sequence[float], titles: Sequence[str]) -> tuple[Column, ...]:
    """Give each stretch of a chart its figures as words, which a pointer finds there."""
    return tuple(
        Column(begin=begin, width=round(end - begin, 1), title=title)
        for begin, end, title in zip(edges, edges[1:], titles, strict=False)
    )


def height_of(highest: float, limit: int | None, pixels: int) -> Height:
    """Return a scale with room for texts above it all; a limit that is far away is left out."""
    is_near = limit is not None and limit < _FAR * highest
    return Height(_HEADROOM * max(highest, limit if is_near and limit else 0, 1), pixels)


def limited(
    height: Height, limit: int | None, text: str, highest: float, *, is_left: bool
) -> tuple[Limit | None, tuple[Band, ...]]:
    """Draw a limit with its text on it; where there is no room for it, the key names it."""
    if limit is None:
        return None, ()
    if highest <= limit <= height.top:
        return Limit(y=height.y(limit), text=text, is_left=is_left), ()
    is_above = limit > height.top
    return None, (
        Band(
            name=text,
            note="above the picture" if is_above else "",
            colour="c-limit",
            path=Markup("" if is_above else f"M0 {height.y(limit):g}H{WIDTH:g}"),
            is_line=True,
        ),
    )


def stairs(edges: Sequence[float], levels: Sequence[float | None], height: Height) -> Markup:
    """Draw a line of stairs; it has gaps where a level is None."""
    drawn, at = "", 0
    while at < len(levels):
        end = at
        piece: list[float] = []
        while end < len(levels) and (level := levels[end]) is not None:
            piece.append(height.y(level))
            end += 1
        if piece:
            drawn += f"M{edges[at]:g} {piece[0]:g}{in_steps(edges[at : end + 1], piece)}"
        at = end + 1
    return Markup(drawn)


def percent_of(place: float) -> float:
    """Turn units of the chart into percents of its width."""
    return round(100 * place / WIDTH, 2)
