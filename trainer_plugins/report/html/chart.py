"""Charts as values; `parts.html.jinja` turns them into SVG.

Places from left to right are percents of the width, so that text keeps its size where the page is
narrow. Paths are in units that are stretched (`WIDTH`). Heights are pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from trainer_plugins.units import GIB, MIB, size

WIDTH = 1000.0  # of a chart in units, before it is stretched to its place on the page
_ROUND_SECONDS = (
    *(factor * 10**exponent for exponent in (-3, -2, -1) for factor in (1, 2, 5)),
    *(1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200),
)
_DAY_SECONDS = 86400
_UNIT_SECONDS = ((_DAY_SECONDS, "d"), (3600, "h"), (60, "min"))
_HEADROOM = 1.16  # leaves room for texts above the highest number
_FAR = 2.5  # a limit of this many times the memory in use would flatten the picture

# The names of each colour, on every page.
_NAMES = {
    "weights": ("weights", "parameter", "parameters"),
    "frozen": ("frozen weights", "buffer"),
    "gradients": ("gradient", "gradients"),
    "optimizer": ("optimizer", "optimizer states"),
    "activations": ("activation", "activations"),
    "saved": ("saved by autograd", "autocast copies of weights"),
    "temporaries": ("temporaries",),
    "logits": ("logits", "logits and loss"),
    "cache": ("KV cache",),
    "buffers": ("sharding buffers", "waiting"),
    "train": ("train",),
    "eval": ("eval", "evaluation", "predict"),
    "generate": ("generate", "generation"),
    "save": ("save",),
    "first": ("forward",),
    "second": ("backward",),
    "third": ("optimizer step",),
}
_COLOURS = {name: colour for colour, names in _NAMES.items() for name in names}
# A row of texts under a picture: its name; places in percent, and texts.
AxisRow = tuple[str, tuple[tuple[float, str], ...]]


@dataclass(frozen=True, slots=True)
class Height:
    """Turns a number into a height in the picture, where y grows downwards."""

    top: float  # the number at the upper edge
    pixels: int

    def y(self, number: float) -> float:
        return round(self.pixels * (1 - min(number, self.top) / self.top), 1)


@dataclass(frozen=True, slots=True)
class Tick:
    """Holds a round number on an axis: its place and its text."""

    at: float
    text: str


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
    """Draw areas between `edges` on top of each other; `names` are name, colour and note."""
    found, below = [], [height.y(0)] * (len(edges) - 1)
    for (name, colour, note), numbers in zip(names, levels, strict=True):
        above = [height.y(number) for number in numbers]
        if above != below:
            path = Markup(area(edges, below, above))
            found.append(Band(name=name, colour=colour, path=path, note=note))
        below = above
    return tuple(found)


def areas(outside: int, kept: int, peak: int, reserved: int) -> list[tuple[str, str, str]]:
    """Name the areas of a card's memory, from the bottom to the top: name, colour and size."""
    return [
        ("outside torch", "c-outside", size(outside)),
        ("tensors between steps", "c-kept", size(kept)),
        ("more within a step", "c-within", size(peak - kept)),
        ("cache", "c-cached", size(max(0, reserved - peak))),
    ]


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


def byte_ticks(height: Height, most: int = 6) -> tuple[str, tuple[Tick, ...]]:
    """Return the unit, and ticks at 1, 2 or 5 times a power of ten of it.

    >>> unit, ticks = byte_ticks(Height(50 * MIB, 100))
    >>> unit, [tick.text for tick in ticks]
    ('MiB', ['0', '10', '20', '30', '40', '50'])
    """
    unit, name = (GIB, "GiB") if height.top >= GIB else (MIB, "MiB")
    every = _round(height.top / unit, most)
    numbers = [every * number for number in range(int(height.top / unit / every) + 1)]
    return name, tuple(Tick(height.y(number * unit), f"{number:g}") for number in numbers)


def number_ticks(height: Height, most: int = 3) -> tuple[Tick, ...]:
    """Return ticks of plain numbers; large ones in thousands or millions."""
    every = _round(height.top, most)
    numbers = [every * number for number in range(int(height.top / every) + 1)]
    unit, name = (1e6, "M") if every >= 1e6 else (1e3, "k") if every >= 1e3 else (1.0, "")
    texts = (f"{number / unit:g}{name if number else ''}" for number in numbers)
    return tuple(map(Tick, map(height.y, numbers), texts))


def _round(top: float, most: int) -> float:
    """Return the smallest step of 1, 2, 5, 10 and so on that needs at most `most` ticks."""
    every, factors, number = 1e-3, (2.0, 2.5, 2.0), 0
    while top / every > most:
        every *= factors[number % len(factors)]
        number += 1
    return round(every, 3)


def time_ticks(seconds: float, most: int = 5) -> tuple[tuple[float, str], ...]:
    """Return round times from the beginning on, and their texts.

    >>> time_ticks(100)
    ((0, '0 s'), (20, '20 s'), (40, '40 s'), (60, '60 s'), (80, '80 s'), (100, '100 s'))
    """
    every = next((each for each in _ROUND_SECONDS if seconds / each <= most), 0.0)
    if not every:
        every = _DAY_SECONDS * max(1, -(-int(seconds / _DAY_SECONDS) // most))
    numbers = [every * number for number in range(int(seconds / every) + 1)]
    whole = (each for each in _UNIT_SECONDS if every % each[0] == 0 and seconds > 2 * each[0])
    unit, name = next(whole, (1, "s"))
    return tuple((number, f"{number / unit:g} {name}") for number in numbers)


def seconds_text(seconds: float) -> str:
    """Render a duration for people.

    >>> seconds_text(0.0321), seconds_text(4.2), seconds_text(75), seconds_text(9000)
    ('32 ms', '4.2 s', '75 s', '2.5 h')
    """
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def in_steps(edges: Sequence[float], levels: Sequence[float]) -> str:
    """Draw stairs from the first edge on: level `n` until edge `n + 1`; equal ones are joined.

    >>> in_steps([0, 1, 2, 3], [5, 5, 7])
    'V5H2V7H3'
    """
    drawn = ""
    for number, level in enumerate(levels):
        if number + 1 == len(levels) or levels[number + 1] != level:
            drawn += f"V{level:g}H{edges[number + 1]:g}"
    return drawn


def area(edges: Sequence[float], lows: Sequence[float], highs: Sequence[float]) -> str:
    """Draw the area between two stairs, as an SVG path.

    >>> area([0, 1, 2], [9, 9], [5, 7])
    'M0 9V5H1V7H2V9H0Z'
    """
    back = in_steps(edges[::-1], lows[::-1])
    return f"M{edges[0]:g} {lows[0]:g}{in_steps(edges, highs)}{back}Z"
