"""Render comparisons for the terminal: a plan with its run, a search, the savings of changes."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainer_plugins.planner.calibrate import Calibration
from trainer_plugins.planner.compare.lines import SearchLine, SearchResult
from trainer_plugins.planner.compare.saved import Saved
from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.report.page import plain_table
from trainer_plugins.report.plan_text import WHEN, name_largest
from trainer_plugins.units import GIB, size


def calibration_report(calibration: Calibration) -> RenderableType:
    """Render each counter at each moment, worst first, then the memory outside the allocator."""
    table = plain_table("moment", "", "predicted", "measured", "difference", left=("",))
    for each in calibration.differences:
        numbers = (size(each.predicted_bytes), size(each.measured_bytes), f"{each.fraction:+.2%}")
        table.add_row(each.moment, each.counter, *numbers)
    lines = [
        f"{size(calibration.context_bytes)} of the card was in use outside the allocator: the"
        " context, NCCL, other processes",
        *calibration.remarks,
    ]
    if calibration.kept_in is not None:
        lines.append(
            "Later plans for this card use that context size. To undo this, delete"
            f" {calibration.kept_in}"
        )
    return Group(table, *map(Text, lines))


_CRITERION = (
    "Best means the most tokens per forward pass of one card; among equals, without"
    " checkpointing. Speed is not predicted"
)


def search_report(result: SearchResult) -> RenderableType:
    """Render the best settings and their flags, then the table, and its limits."""
    rows = f"{result.effective_batch} rows per optimizer step"
    cards = f" on {result.num_gpus} GPUs" if result.num_gpus > 1 else ""
    card = f"{result.gpu} ({size(result.capacity_bytes)})"
    parts: list[RenderableType] = []
    if result.best is not None:
        parts.append(Text(f"Best on {card}: {line_in_words(result.best)}", style="bold green"))
        parts += map(Text, _to_copy(result.best))
    else:
        place = f"on {card}"
        if all(line.margin_bytes >= 0 for line in result.lines):
            place = "in main memory"
        words = f"Nothing fits {place}, not even the smallest micro-batch"
        parts.append(Text(words, style="bold red"))
    heading = f"The largest micro-batch that fits, at {rows}{cards}"
    parts += [Text(heading, style="bold"), lines_table(result.lines, result.best)]
    if result.best is not None:
        parts.append(Text(_CRITERION))
    return Group(*parts)


def lines_table(lines: Sequence[SearchLine], best: SearchLine | None) -> Table:
    """Render the lines of a search, the best one bold."""
    rows = [_make_cells(line) for line in lines]
    if len({line.sequence_length for line in lines}) == 1:
        for row in rows:
            del row["length"]
    table = plain_table(*rows[0])
    table.columns[0].no_wrap = True
    for line, row in zip(lines, rows, strict=True):
        table.add_row(*row.values(), style="bold" if line == best else None)
    return table


def _make_cells(line: SearchLine) -> dict[str, str]:
    return {
        "check-\npointing": "on" if line.gradient_checkpointing else "off",
        "length": str(line.sequence_length),
        "micro-\nbatch": str(line.micro_batch) if line.fits else "none fits",
        "accumu-\nlation": str(line.accumulation_steps) if line.fits else "",
        "reserved\nGiB": f"{line.reserved_peak_bytes / GIB:.2f}",
        "to spare\nGiB": f"{line.margin_bytes / GIB:.2f}",
        "host RAM\nGiB": f"{line.host_ram_bytes_per_node / GIB:.2f}",
    }


def line_in_words(line: SearchLine) -> str:
    """Describe one line of a search."""
    checkpointing = "with" if line.gradient_checkpointing else "without"
    begin = f"{checkpointing} checkpointing, {line.sequence_length} tokens"
    if not line.fits:
        short = "main memory is" if line.margin_bytes >= 0 else f"{size(-line.margin_bytes)}"
        return f"{begin}: {short} short with a micro-batch of {line.micro_batch}"
    steps = f"{line.micro_batch} x {line.accumulation_steps} rows"
    return f"{begin}: {steps} fit, {size(line.margin_bytes)} to spare"


def _to_copy(best: SearchLine) -> list[str]:
    lines = [
        f"  flags   {best.flags}",
        f"  Hydra   {best.hydra_overrides}",
        f"  length  {best.sequence_length} tokens in each row",
    ]
    if not best.is_safe:
        lines.append("  It may fail: the margin is below the planner's known error")
    return lines


def changes_report(plan: MemoryPlan, saved: Sequence[Saved]) -> RenderableType:
    """Render the savings of each switch."""
    numbers = ("allocated saved", "reserved saved", "nvidia-smi then", "fits then")
    table = plain_table("switch", *numbers, "with", left=("with",))
    for each in saved:
        sizes = (each.allocated_saved_bytes, each.reserved_saved_bytes, each.nvidia_smi_peak_bytes)
        table.add_row(
            each.change,
            *("" if num_bytes is None else size(num_bytes) for num_bytes in sizes),
            {True: "yes", False: "no", None: ""}[each.fits],
            each.reason or each.how,
        )
    allocated, reserved = size(plan.allocated_peak_bytes), size(plan.reserved_peak_bytes)
    heading = f"The run as it is: allocated {allocated}, reserved {reserved}. Each switch alone:"
    filled = Text(f"The peak, {WHEN[plan.moment]}: {name_largest(plan)}")
    return Group(Text(heading, style="bold"), table, filled)
