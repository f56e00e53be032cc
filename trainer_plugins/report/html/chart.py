"""Define charts as values, which `page.js` draws; colours are names in the style sheet."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from trainer_plugins.units import size

_HEADROOM = 1.16  # leaves room for labels above the highest value
_FAR = 2.5  # a limit this many times above the memory in use would flatten the picture

# The categories of each colour, on every page.
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
    "buffers": ("sharding buffers", "gathered parameters", "waiting"),
    "eval": ("eval", "evaluation", "predict"),
    "generate": ("generate", "generation"),
    "save": ("save",),
    "first": ("forward",),
    "second": ("backward",),
    "third": ("optimizer step",),
}
_COLOURS = {name: colour for colour, names in _NAMES.items() for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLine:
    """Holds a line, or the upper edge of an area: a number for each stretch, None for a gap."""

    name: str
    colour: str
    values: Sequence[float | None]
    note: str = ""  # text behind the name in the key
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """Marks a point, or (with `at` None) a limit, with a text."""

    value: float
    text: str
    at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Shades a part of the axis; a span without width is a stroke."""

    begin: float
    end: float
    colour: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Stands below the picture, and may link to a place on the page."""

    at: float
    colour: str
    text: str
    title: str
    href: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """Explains a colour."""

    name: str
    colour: str
    text: str = ""
    isLine: bool = False  # noqa: N815 - a name of the script's


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Holds a picture with two axes; stretches lie between `edges`."""

    name: str  # without spaces
    title: str
    pixels: int
    unit: Literal["bytes", "s"] = "bytes"
    axis: Literal["seconds", "moments"] = "seconds"
    top: float  # the number at the upper edge
    edges: Sequence[float]
    steps: Sequence[int] = ()  # the last step of each stretch; the axis then counts steps
    areas: Sequence[ChartLine] = ()  # from bottom to top, each on top of the one before
    lines: Sequence[ChartLine] = ()
    said: Sequence[str]  # a description of each stretch
    hint: str = ""
    limit: Dot | None = None
    dot: Dot | None = None
    uprights: Sequence[float] = ()  # an OOM
    spans: Sequence[Span] = ()
    marks: Sequence[Mark] = ()
    words: Sequence[tuple[float, str]] = ()  # names below the axis
    others: Sequence[Key] = ()


def areas_of_card(
    levels: Sequence[Sequence[float]], outside: int, kept: int, peak: int, reserved: int
) -> list[ChartLine]:
    """Build the areas of a card's memory from levels that include those below, with sizes."""
    names = (
        ("outside torch", "outside", outside),
        ("tensors between steps", "kept", kept),
        ("more within a step", "within", peak - kept),
        ("cache", "cached", max(0, reserved - peak)),
    )
    highest = accumulate(levels, lambda low, high: [*map(max, low, high)])
    return [
        ChartLine(name=name, colour=colour, note=size(num_bytes), values=values)
        for (name, colour, num_bytes), values in zip(names, highest, strict=True)
    ]


def draw_limit(highest: float, limit: int | None) -> tuple[float, Dot | None, tuple[Key, ...]]:
    """Return the upper edge of a picture, and the card's limit; the key mentions one far above."""
    top = _HEADROOM * max(highest, 1)
    if limit is None:
        return top, None, ()
    text = f"the card: {size(limit)}"
    if limit >= _FAR * highest:
        return top, None, (Key(name=text, text="above the picture", colour="limit", isLine=True),)
    return _HEADROOM * max(highest, limit), Dot(value=limit, text=text), ()


def colour_of(name: str) -> str:
    """Return the style sheet's colour of a category or a moment; grey for all others.

    >>> colour_of("parameters"), colour_of("workspaces")
    ('weights', 'other')
    """
    return _COLOURS.get(name, "other")
