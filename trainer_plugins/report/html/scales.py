"""Places numbers in a chart, and chooses the round numbers on its axes."""

from collections.abc import Sequence
from dataclasses import dataclass

from trainer_plugins.units import GIB, MIB

WIDTH = 1000.0  # of a chart in units, before it is stretched to its place on the page
_ROUND_SECONDS = (
    *(factor * 10**exponent for exponent in (-3, -2, -1) for factor in (1, 2, 5)),
    *(1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200),
)
_DAY_SECONDS = 86400
_UNIT_SECONDS = ((_DAY_SECONDS, "d"), (3600, "h"), (60, "min"))


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
    return tuple(
        Tick(height.y(number), f"{number / unit:g}{name if number else ''}") for number in numbers
    )


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
    unit, name = next(
        ((unit, name) for unit, name in _UNIT_SECONDS if every % unit == 0 and seconds > 2 * unit),
        (1, "s"),
    )
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
