"""Charts as values; `parts.html.jinja` turns them into SVG.

Places from left to right are percents of the width, so that text keeps its size where the page is
narrow. Paths are in units that are stretched (`scales.WIDTH`). Heights are pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from trainer_plugins.report.html.scales import WIDTH, Height, Tick, area, in_steps

_HEADROOM = 1.16  # leaves room for texts above the highest number
_FAR = 2.5  # a limit of this many times the memory in use would flatten the picture


# The colour of each use of memory, on every page.
_COLOURS = {
    "weights": "weights",
    "parameter": "weights",
    "parameters": "weights",
    "frozen weights": "frozen",
    "buffer": "frozen",
    "gradient": "gradients",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "optimizer states": "optimizer",
    "activation": "activations",
    "activations": "activations",
    "saved by autograd": "saved",
    "autocast copies of weights": "saved",
    "temporaries": "temporaries",
    "logits": "logits",
    "logits and loss": "logits",
    "KV cache": "cache",
    "sharding buffers": "buffers",
    "waiting": "buffers",
    "train": "train",
    "eval": "eval",
    "evaluation": "eval",
    "predict": "eval",
    "generate": "generate",
    "generation": "generate",
    "save": "save",
    "forward": "first",
    "backward": "second",
    "optimizer step": "third",
}
# A row of texts under a picture: its name; places in percent, and texts.
AxisRow = tuple[str, tuple[tuple[float, str], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Holds an area or a line, and its entry in the key."""

    name: str
    colour: str  # a class of the style sheet
    path: Markup
    is_line: bool = False
    note: str = ""  # text behind the name in the key


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
    """Holds an upper limit, with its text above its line."""

    y: float
    text: str
    is_left: bool  # whether the text stands at the left, because there is a mark at the right


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """Stands at one moment of a lane."""

    at_percent: float
    width_percent: float = 0.0  # 0 is a sign without a width, such as a finding
    colour: str
    title: str
    text: str = ""
    word: str = ""  # the text on a wide page
    href: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Holds the events on a line under a chart."""

    name: str
    signs: tuple[Sign, ...]
    label: str = ""  # text next to the first sign
    label_percent: float = 0.0
    # Where the label stands. Above, it has a line of its own; below, signs have texts there.
    side: Literal["left", "right", "above", "below"] = "right"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Holds the figures of a chart as text."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Holds a picture with two axes, and the lanes under it."""

    name: str  # without blanks: it is part of ids in the page
    title: str
    description: str
    pixels: int
    unit: str
    ticks: tuple[Tick, ...]
    bands: tuple[Band, ...]
    times: tuple[AxisRow, ...] = ()
    lines_percent: tuple[float, ...] = ()  # the places of upright lines through the picture: an OOM
    limit: Limit | None = None
    dot: Dot | None = None
    lanes: tuple[Lane, ...] = ()
    lane_key: tuple[tuple[str, str], ...] = ()  # name and colour of the signs without text
    edges: Sequence[float] = ()  # where each stretch begins, and the last one ends
    titles: Sequence[str] = ()  # the figures of each stretch, as a tooltip
    table: Table | None = None


def stacked(
    edges: Sequence[float],
    levels: Sequence[Sequence[float]],
    names: Sequence[tuple[str, str, str]],
    height: Height,
) -> tuple[Band, ...]:
    """Draw areas on top of each other, by the upper edge of each; empty ones are left out.

    `edges` are where each stretch begins, and the last one ends; `names` are name, colour and note.
    """
    found, below = [], [height.y(0)] * (len(edges) - 1)
    for (name, colour, note), numbers in zip(names, levels, strict=True):
        above = [height.y(number) for number in numbers]
        if above != below:
            path = Markup(area(edges, below, above))
            found.append(Band(name=name, colour=colour, path=path, note=note))
        below = above
    return tuple(found)


def height_of(highest: float, limit: int | None, pixels: int) -> Height:
    """Return a scale with room for texts above the highest number, and above a limit nearby."""
    is_near = limit is not None and limit < _FAR * highest
    return Height(_HEADROOM * max(highest, limit if is_near and limit else 0, 1), pixels)


def limited(
    height: Height, limit: int | None, text: str, highest: float, *, is_left: bool
) -> tuple[Limit | None, tuple[Band, ...]]:
    """Draw a limit with its text; if there is no room for that, the key names it."""
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


def colour_of(name: str) -> str:
    """Return the class in the style sheet for a category or a moment; the rest is grey.

    >>> colour_of("parameters"), colour_of("workspaces")
    ('c-weights', 'c-other')
    """
    return f"c-{_COLOURS.get(name, 'other')}"
