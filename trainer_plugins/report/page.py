"""Prints pages in the terminal: foreign text is harmless, and no figure is cut."""

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from trainer_plugins.printable import printable

_WIDE = 10_000
"""Line width in characters for a file or another program, where nothing is wrapped."""


def show(page: RenderableType) -> None:
    """Print a page to standard output.

    Names and messages in it may be anybody's: markup in them stays text, and control characters
    become visible (`printable`). On a terminal text is wrapped, but a table wider than the terminal
    is not, nor a text that forbids it. Elsewhere nothing is wrapped.
    """
    console = Console(markup=False, emoji=False, highlight=False)
    width = console.width if console.is_terminal else _WIDE
    for part in _parts(page):
        console.width = max(width, _needed(part, console)) if isinstance(part, Table) else width
        is_one_line = isinstance(part, Text) and part.no_wrap
        console.print(_Shown(part), soft_wrap=is_one_line)


def _parts(page: RenderableType) -> Iterator[RenderableType]:
    if isinstance(page, Group):
        for part in page.renderables:
            yield from _parts(part)
    else:
        yield page


def _needed(table: Table, console: Console) -> int:
    """Return the width at which a table's figures are whole; its other columns may be folded."""
    options = console.options.update(width=_WIDE)
    for column in table.columns:
        if column.justify == "right":
            column.no_wrap = True
            column.min_width = max(
                (Measurement.get(console, options, cell).maximum for cell in column.cells),
                default=0,
            )
        else:
            column.overflow = "fold"
    return Measurement.get(console, options, table).minimum


class _Shown:
    """Wraps a renderable so that a terminal finds nothing in it to obey."""

    def __init__(self, part: RenderableType) -> None:
        self.part = part

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.part, options):
            if segment.control:
                yield segment
            else:
                yield Segment("\n".join(map(printable, segment.text.split("\n"))), segment.style)
