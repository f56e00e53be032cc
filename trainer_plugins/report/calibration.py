"""A plan beside the run that it was made for, in the terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainer_plugins.planner.calibrate import Calibration
from trainer_plugins.units import size


def calibration_report(calibration: Calibration) -> RenderableType:
    """Each counter of each moment, the worst first, then what was not the allocator's, and where that is kept."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("moment")
    table.add_column("")
    for column in ("predicted", "measured", "difference"):
        table.add_column(column, justify="right")
    for each in calibration.differences:
        numbers = (size(each.predicted_bytes), size(each.measured_bytes), f"{each.fraction:+.2%}")
        table.add_row(each.moment, each.counter, *numbers)
    lines = [
        f"Of the card {size(calibration.context_bytes)} was not the allocator's: the context, NCCL, other processes",
        *calibration.remarks,
    ]
    if calibration.kept_in is not None:
        lines.append(
            f"Later plans for this card count that as its context: {calibration.kept_in}. Delete it to undo"
        )
    return Group(table, *(Text(line) for line in lines))
