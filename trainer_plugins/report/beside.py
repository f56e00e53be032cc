"""Renders two plans or runs side by side, for the terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainer_plugins.planner.compare.beside import Beside, Pair
from trainer_plugins.units import MIB, size


def beside_report(found: Beside) -> RenderableType:
    """Render what was planned otherwise, then the peaks by moment, then the peak by category."""
    lines: list[RenderableType] = [Text(f"A: {found.a}"), Text(f"B: {found.b}")]
    lines += [Text(f"{name}: {a or 'none'} | {b or 'none'}") for name, a, b in found.changes]
    lines.append(_table("moment", found.moments))
    if found.categories:
        lines.append(_table("allocated at the peak", found.categories))
    return Group(*lines)


def _table(heading: str, pairs: tuple[Pair, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(heading)
    for column in ("A", "B", "B - A"):
        table.add_column(column, justify="right")
    for pair in pairs:
        if max(pair.a_bytes or 0, pair.b_bytes or 0) * 20 < MIB:
            continue  # a few buffers, which would show as 0.0 MiB
        table.add_row(pair.name, _size(pair.a_bytes), _size(pair.b_bytes), _difference(pair))
    return table


def _size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else size(num_bytes)


def _difference(pair: Pair) -> str:
    if pair.a_bytes is None or pair.b_bytes is None:
        return ""
    change = pair.b_bytes - pair.a_bytes
    share = f" ({change / pair.a_bytes:+.1%})" if pair.a_bytes else ""
    return f"{'+' if change >= 0 else '-'}{size(abs(change))}{share}"
