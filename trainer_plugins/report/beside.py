"""Renders two plans or runs side by side, or a plan next to its run, for the terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainer_plugins.planner.calibrate import Calibration
from trainer_plugins.planner.compare.beside import Beside, Pair
from trainer_plugins.report.page import plain_table
from trainer_plugins.units import MIB, size


def beside_report(found: Beside) -> RenderableType:
    """Render the differences in what was planned, then the peaks by moment and by category."""
    lines: list[RenderableType] = [Text(f"A: {found.a}"), Text(f"B: {found.b}")]
    lines += [Text(f"{name}: {a or 'none'} | {b or 'none'}") for name, a, b in found.changes]
    lines.append(_table("moment", found.moments))
    if found.categories:
        lines.append(_table("allocated at the peak", found.categories))
    return Group(*lines)


def _table(heading: str, pairs: tuple[Pair, ...]) -> Table:
    table = plain_table(heading, "A", "B", "B - A")
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


def calibration_report(calibration: Calibration) -> RenderableType:
    """Render each counter of each moment, worst first, then the memory outside the allocator."""
    table = plain_table("moment", "", "predicted", "measured", "difference", left=("",))
    for each in calibration.differences:
        numbers = (size(each.predicted_bytes), size(each.measured_bytes), f"{each.fraction:+.2%}")
        table.add_row(each.moment, each.counter, *numbers)
    lines = [
        f"{size(calibration.context_bytes)} of the card was outside the allocator: the context,"
        " NCCL, other processes",
        *calibration.remarks,
    ]
    if calibration.kept_in is not None:
        lines.append(
            "Later plans for this card use that size for the context. To undo this, delete"
            f" {calibration.kept_in}"
        )
    return Group(table, *map(Text, lines))
