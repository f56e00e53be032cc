"""Print pages in the terminal: foreign text is harmless, and no figure is cut off."""

from collections.abc import Container, Iterator

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from trainer_plugins.finding import Severity
from trainer_plugins.printable import printable

STYLES = {Severity.INFO: "cyan", Severity.WARNING: "yellow", Severity.ERROR: "red"}

_WIDE = 10_000  # width in characters for a file or another program, where nothing wraps


def show(page: RenderableType) -> None:
    """Print a page; markup and control characters stay text, and no table is narrowed."""
    console = Console(markup=False, emoji=False, highlight=False)
    width = console.width if console.is_terminal else _WIDE
    for part in _parts(page):
        console.width = (
            max(width, _measure_width(part, console)) if isinstance(part, Table) else width
        )
        is_one_line = isinstance(part, Text) and part.no_wrap
        console.print(_ShownPart(part), soft_wrap=is_one_line)


def plain_table(first: str, *others: str, left: Container[str] = ()) -> Table:
    """Build a table without lines: text in the first column and in `left`, else numbers."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(first)
    for other in others:
        table.add_column(other, justify="left" if other in left else "right", overflow="fold")
    return table


def to_paste(line: str) -> Text:
    """Build a line that never wraps, so that you can copy it."""
    return Text(line, no_wrap=True, overflow="ignore")


def _parts(page: RenderableType) -> Iterator[RenderableType]:
    if isinstance(page, Group):
        for part in page.renderables:
            yield from _parts(part)
    else:
        yield page


def _measure_width(table: Table, console: Console) -> int:
    """Return the width at which numbers stay whole; the other columns may fold."""
    options = console.options.update(width=_WIDE)
    for column in table.columns:
        if column.justify == "right":
            column.no_wrap = True
            widths = (Measurement.get(console, options, cell).maximum for cell in column.cells)
            column.min_width = max(widths, default=0)
        else:
            column.overflow = "fold"
    return Measurement.get(console, options, table).minimum


class _ShownPart:
    def __init__(self, part: RenderableType) -> None:
        self.part = part

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.part, options):
            if segment.control:
                yield segment
            else:
                yield Segment("\n".join(map(printable, segment.text.split("\n"))), segment.style)
