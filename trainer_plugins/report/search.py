"""Renders what a search found, and what switches save, for the terminal."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainer_plugins.planner.compare.changes import Saved
from trainer_plugins.planner.compare.lines import (
    AS_GIVEN,
    STREAMED,
    WITH_CHECKPOINTING,
    SearchLine,
    SearchResult,
)
from trainer_plugins.planner.plan import MemoryPlan, at_least
from trainer_plugins.units import GIB, size

_NOTHING = "No way to run could be predicted"


def search_report(result: SearchResult) -> RenderableType:
    """Render the table of a search, its best line to copy, and what could not be predicted."""
    rows = f"{result.effective_batch} rows between optimizer steps"
    cards = f" on {result.num_gpus} GPUs" if result.num_gpus > 1 else ""
    card = f"{result.gpu} ({size(result.capacity_bytes)})"
    parts: list[RenderableType] = [
        Text(f"The largest micro-batches on {card}; {rows}{cards}, in every line", style="bold")
    ]
    parts.append(lines_table(result.lines, result.best, [name for name, _ in result.refused]))
    if result.best is not None:
        parts += [Text(line) for line in _to_copy(result.best)]
    else:
        said = "Nothing fits, not even the smallest micro-batch" if result.lines else _NOTHING
        parts.append(Text(said, style="bold"))
    parts += [Text(f"{strategy}: {reason}") for strategy, reason in result.refused]
    parts += [Text(f"not tried: {way}: {reason}") for way, reason in result.not_tried]
    return Group(*parts)


def lines_table(
    lines: Sequence[SearchLine], best: SearchLine | None, refused: Sequence[str] = ()
) -> Table:
    """Render the lines of a search, the best one bold; and the ways that are not predicted."""
    one_length = len({line.sequence_length for line in lines}) == 1
    table = _table(
        "strategy",
        "check-\npointing",
        *([] if one_length else ["length"]),
        "micro-\nbatch",
        "accumu-\nlation",
    )
    table.columns[0].no_wrap = True
    for name in ("reserved\nGiB", "to spare\nGiB", "host RAM\nGiB", "layers\nrun"):
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(*_cells(line, one_length), style="bold" if line == best else None)
    for name in refused:
        strategy, _, checkpointing = name.partition(WITH_CHECKPOINTING)
        blank = [] if one_length else [""]
        table.add_row(strategy, "on" if checkpointing else "off", *blank, "not predicted")
    return table


def line_in_words(line: SearchLine) -> str:
    """Say in one line what was found for one way to run."""
    checkpointing = WITH_CHECKPOINTING if line.gradient_checkpointing else ""
    begin = f"{line.strategy}{checkpointing}, {line.sequence_length} tokens"
    if not line.fits:
        return f"{begin}: {size(-line.margin_bytes)} short with {line.micro_batch} row(s) at once"
    steps = f"{line.micro_batch} x {line.accumulation_steps} rows"
    bus = f"; {at_least(line.copy_seconds_per_step)}" if line.copy_seconds_per_step else ""
    return f"{begin}: {steps} fit, {size(line.margin_bytes)} to spare{bus}"


def _cells(line: SearchLine, one_length: bool) -> list[str]:
    return [
        line.strategy,
        "on" if line.gradient_checkpointing else "off",
        *([] if one_length else [str(line.sequence_length)]),
        str(line.micro_batch) if line.fits else "none fits",
        str(line.accumulation_steps) if line.fits else "",
        f"{line.reserved_peak_bytes / GIB:.2f}",
        f"{line.margin_bytes / GIB:.2f}",
        f"{line.host_ram_bytes_per_node / GIB:.2f}",
        "all" if line.in_full else "a few",
    ]


def _to_copy(best: SearchLine) -> list[str]:
    """Return the best line's settings, and the rule by which it is best: memory, not speed."""
    lines = [
        "Best: the most tokens in one forward pass of a card, without offload if anything fits so;"
        " of equals, the one without checkpointing, the plainest strategy, the longest rows. Speed"
        " is not predicted",
        f"  flags   {best.flags}",
        f"  Hydra   {best.hydra_overrides}",
        f"  length  {best.sequence_length} tokens in each row",
    ]
    if not best.is_safe:
        lines.append("  It leaves less free than plans are known to be wrong: it may fail")
    if best.strategy == STREAMED:
        lines.append(f"  stream  the callback StreamBase; {at_least(best.copy_seconds_per_step)}")
    elif best.strategy != AS_GIVEN:
        launch = f"trainer-plugins configs copy {best.strategy}"
        lines.append(f"  launch  accelerate's config {best.strategy} ({launch})")
    return lines


def changes_report(plan: MemoryPlan, saved: Sequence[Saved]) -> RenderableType:
    """Render what each switch would save, compared with the run as it is."""
    table = _table("switch", "allocated saved", "reserved saved", "nvidia-smi then", "fits then")
    table.add_column("with", overflow="fold")
    for each in saved:
        if each.reason is not None:
            table.add_row(each.change, "", "", "", "", each.reason)
        else:
            table.add_row(
                each.change,
                *_savings(each),
                {True: "yes", False: "no", None: ""}[each.fits],
                each.how,
            )
    as_it_is = (
        f"allocated {size(plan.allocated_peak_bytes)}, reserved {size(plan.reserved_peak_bytes)}"
    )
    return Group(
        Text(f"The run as it is: {as_it_is}. Each switch alone, predicted anew:", style="bold"),
        table,
    )


def _savings(saved: Saved) -> list[str]:
    numbers = (saved.allocated_saved_bytes, saved.reserved_saved_bytes, saved.nvidia_smi_peak_bytes)
    return [size(number) if number is not None else "" for number in numbers]


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(first)
    for other in others:
        table.add_column(other, justify="right")
    return table
