"""Renders a plan beside the run that it was made for, for the terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainer_plugins.planner.calibrate import Calibration
from trainer_plugins.units import size


def calibration_report(calibration: Calibration) -> RenderableType:
    """Render each counter of each moment, worst first, then the memory outside the allocator."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("moment")
    table.add_column("")
    for column in ("predicted", "measured", "difference"):
        table.add_column(column, justify="right")
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
            "Later plans for this card count that as its context: it is stored in"
            f" {calibration.kept_in}. Delete that file to undo this"
        )
    return Group(table, *(Text(line) for line in lines))
