"""Renders a plan for the terminal: alone, next to another or its run; and what a search found."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainer_plugins.planner.calibrate import Calibration
from trainer_plugins.planner.compare.beside import Beside, Pair
from trainer_plugins.planner.compare.lines import (
    AS_GIVEN,
    STREAMED,
    WITH_CHECKPOINTING,
    SearchLine,
    SearchResult,
)
from trainer_plugins.planner.compare.switches import Saved
from trainer_plugins.planner.plan import MemoryPlan, at_least, peak_until_resume
from trainer_plugins.report.page import plain_table, size_or_blank, to_paste
from trainer_plugins.report.words import words_of
from trainer_plugins.units import GIB, MIB, percent, size

_SHOWN_BYTES = MIB / 20  # less would show as 0.0 MiB


def plan_report(plan: MemoryPlan) -> RenderableType:
    """Render the verdict, the figures, the peak by category, moments, tensors and caveats."""
    style = {True: "bold green", False: "bold red", None: "bold"}[plan.fits]
    parts: list[RenderableType] = [Text(verdict(plan), style=style)]
    parts += [Text(line, style="bold") for line in host_verdict(plan)]
    parts += map(Text, details(plan))
    if plan.planned:
        parts.append(Text(f"Planned: {planned(plan)}"))
    if "command" in plan.planned:
        parts.append(to_paste(f"Again: {plan.planned['command']}"))
    parts += [_figures(plan), _breakdown(plan), _moments(plan), _tensors(plan)]
    for heading, lines in (
        ("Not predicted", plan.not_predicted),
        ("Less reliable", plan.not_reliable),
        ("Assumed", plan.assumptions),
        ("Known error", (plan.known_error,) if plan.known_error else ()),
    ):
        parts += [Text(f"{heading}: {line}") for line in lines]
    versions = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    return Group(*parts, Text(f"With {versions}"), *_proposals(plan))


def verdict(plan: MemoryPlan) -> str:
    """Say in one short line whether the run fits; without a card, how much its tensors need."""
    if plan.capacity_bytes is None or plan.margin_bytes is None:
        return f"Needs {size(plan.allocated_peak_bytes)}, in the {moment_of(plan)}"
    if plan.fits_card:
        card = f"{plan.gpu} ({size(plan.capacity_bytes)})"
        return f"Fits on {card}: {size(plan.margin_bytes)} to spare, in the {moment_of(plan)}"
    live_short = plan.allocated_peak_bytes + plan.context_bytes - plan.capacity_bytes
    if live_short <= 0:  # a full card releases its cache, but not in one piece
        missing = size(plan.failed_request_bytes or 0)
        return f"Does not fit: no {missing} in one piece, in the {moment_of(plan)}"
    if 2 * live_short < -plan.margin_bytes:
        return f"Does not fit: at least {size(live_short)} short, in the {moment_of(plan)}"
    return f"Does not fit: {size(-plan.margin_bytes)} short, in the {moment_of(plan)}"


def details(plan: MemoryPlan) -> list[str]:
    """Say which numbers the verdict rests on."""
    whose = f"the fullest of {len(plan.cards)} cards" if plan.cards else "each GPU"
    peak = f"{size(plan.nvidia_smi_peak_bytes)} at the peak of {whose}"
    cached = size(plan.reserved_peak_bytes - plan.allocated_peak_bytes)
    lines = []
    if plan.capacity_bytes is None:
        lines.append(
            f"{size(plan.allocated_peak_bytes)} of tensors at the peak of {whose}, and up to"
            f" {cached} of cached blocks, which a full card releases. Name a card with --gpu to"
            " learn whether it fits"
        )
    elif plan.fits_card:
        times = f", after releasing the whole cache {plan.num_flushes} times"
        lines.append(peak + times if plan.num_flushes else peak)
    else:
        capacity = f"{plan.gpu} has {size(plan.capacity_bytes)}"
        peak = f"on a card of unlimited memory: {peak}, {cached} of it cached blocks"
        lines.append(f"{capacity}; {peak}")
        load = plan.moments.get("load")
        if load is not None and load.allocated_bytes + plan.context_bytes > plan.capacity_bytes:
            weights = size(load.allocated_bytes)
            lines.append(f"The weights alone take {weights}: fewer rows cannot help")
        if plan.failed_request_bytes is not None:
            failed = f"{size(plan.failed_request_bytes)} for {plan.failed_request}"
            lines.append(f"The allocator fails on {failed}")
    if plan.smallest_card_bytes is not None:
        fails = f"; on less it fails at {plan.fails_on_less}" if plan.fails_on_less else ""
        lines.append(f"It completes on {size(plan.smallest_card_bytes)} or more{fails}")
    if (base := plan.streamed) is not None:
        lines.append(
            f"The frozen base, {size(base.num_bytes)} in {base.num_layers} layers, is streamed:"
            f" {base.resident_layers} of them are on the card. Each step copies"
            f" {size(base.copied_bytes_per_step)} over the bus:"
            f" {at_least(base.copy_seconds_per_step)}"
        )
    return lines


def moment_of(plan: MemoryPlan) -> str:
    """Name the moment of the peak, as part of a sentence."""
    return f"{plan.moment} pass" if plan.moment in ("forward", "backward") else plan.moment


def planned(plan: MemoryPlan) -> str:
    """Say in one line what was planned, without the command."""
    named = ((name, text) for name, text in plan.planned.items() if name != "command")
    return "; ".join(f"{name} {text}" for name, text in named)


def _proposals(plan: MemoryPlan) -> list[Text]:
    """Render the changes that make it fit: the flags of each in one line, to be copied."""
    lines: list[Text] = []
    if plan.proposals:
        rows = "the rows between optimizer steps stay the same"
        # A command was run with each, in full; that plan also knows its smallest card.
        how = ", predicted from a few layers" if plan.smallest_card_bytes is None else ""
        lines.append(Text(f"These would fit{how}; {rows}:", style="bold"))
    for each in plan.proposals:
        numbers = f"{size(each.nvidia_smi_peak_bytes)}, {size(each.margin_bytes)} to spare"
        host = f", {size(each.host_ram_bytes_per_node)} of main memory"
        lines.append(Text(f"- {', '.join(each.changes)}: {numbers}{host}", style="green"))
        lines += [Text(f"  Price: {each.price}"), to_paste(f"  {each.flags}")]
    if plan.tried_without_success:
        heading = "Too little" if plan.proposals else "Nothing that was tried fits"
        lines.append(Text(f"{heading}: {'; '.join(plan.tried_without_success)}"))
    return lines


def host_verdict(plan: MemoryPlan) -> list[str]:
    """Say in one line whether it fits in main memory; nothing if that size is unknown."""
    if plan.host_shortage is not None:
        return [f"Does not fit in main memory: {plan.host_shortage}"]
    if plan.host_capacity_bytes is None:
        return []
    left = size(plan.host_capacity_bytes - plan.host_bytes_per_node)
    used = f"{size(plan.host_bytes_per_node)} on a machine, {left} to spare"
    return [f"Fits in {size(plan.host_capacity_bytes)} of main memory: {used}"]


def _figures(plan: MemoryPlan) -> Table:
    table = plain_table("", "a GPU")
    table.add_row("allocated (max_memory_allocated)", size(plan.allocated_peak_bytes))
    table.add_row("reserved (max_memory_reserved)", size(plan.reserved_peak_bytes))
    table.add_row("nvidia-smi: reserved plus the context", size(plan.nvidia_smi_peak_bytes))
    tensors = size(plan.host_ram_bytes_per_node)
    never_resumed = size(peak_until_resume(plan.host_moments))
    if plan.host_moments and never_resumed != tensors:
        tensors = f"{never_resumed} ({tensors} when resuming)"
    if plan.host_pinned_bytes_per_node:
        tensors += f"; {size(plan.host_pinned_bytes_per_node)} pinned"
    table.add_row("host RAM per node, for tensors", tensors)
    everything = size(plan.host_bytes_per_node)
    table.add_row("host RAM per node, with Python and its libraries", everything)
    trainable = f"{plan.num_trainable_parameters:,} of {plan.num_parameters:,}"
    table.add_row("trainable parameters", trainable)
    return table


def _breakdown(plan: MemoryPlan) -> Table:
    table = plain_table(f"allocated at the peak ({plan.moment})", "", "")
    for category, num_bytes in sorted(plan.breakdown.items(), key=lambda pair: -pair[1]):
        if num_bytes >= _SHOWN_BYTES:
            share = num_bytes / max(plan.allocated_peak_bytes, 1)
            table.add_row(category, size(num_bytes), percent(share))
    return table


def _moments(plan: MemoryPlan) -> Table:
    table = plain_table("moment", "allocated", "reserved")
    for moment, peak in plan.moments.items():
        table.add_row(moment, size(peak.allocated_bytes), size(peak.reserved_bytes))
    return table


def _tensors(plan: MemoryPlan) -> Table:
    table = plain_table("largest at the peak", "", "made by", left=("made by",))
    for group in plan.groups_at_peak:
        times = f" x {group.count}" if group.count > 1 else ""
        made_by = f"{group.operation.removeprefix('aten::')} in the {group.moment}"
        made_by += f", {group.dtype}" if group.dtype else ""
        table.add_row(words_of(group), f"{size(group.num_bytes)}{times}", made_by)
    return table


def beside_report(found: Beside) -> RenderableType:
    """Render the differences in what was planned, then the peaks by moment and by category."""
    lines: list[RenderableType] = [Text(f"A: {found.a}"), Text(f"B: {found.b}")]
    lines += [Text(f"{name}: {a or 'none'} | {b or 'none'}") for name, a, b in found.changes]
    lines.append(_pairs("moment", found.moments))
    if found.categories:
        lines.append(_pairs("allocated at the peak", found.categories))
    return Group(*lines)


def _pairs(heading: str, pairs: tuple[Pair, ...]) -> Table:
    table = plain_table(heading, "A", "B", "B - A")
    for pair in pairs:
        if max(pair.a_bytes or 0, pair.b_bytes or 0) >= _SHOWN_BYTES:
            sizes = (size_or_blank(pair.a_bytes), size_or_blank(pair.b_bytes))
            table.add_row(pair.name, *sizes, _difference(pair))
    return table


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


_HEADINGS = (
    "strategy",
    "check-\npointing",
    "length",
    "micro-\nbatch",
    "accumu-\nlation",
    "reserved\nGiB",
    "to spare\nGiB",
    "host RAM\nGiB",
    "layers\nrun",
)


def search_report(result: SearchResult) -> RenderableType:
    """Render the table of a search, the flags of its best line, and what was not predicted."""
    rows = f"{result.effective_batch} rows between optimizer steps"
    cards = f" on {result.num_gpus} GPUs" if result.num_gpus > 1 else ""
    card = f"{result.gpu} ({size(result.capacity_bytes)})"
    parts: list[RenderableType] = [
        Text(f"The largest micro-batches on {card}; {rows}{cards}, in every line", style="bold"),
        lines_table(result.lines, result.best, [name for name, _ in result.refused]),
    ]
    if result.best is not None:
        parts += map(Text, _to_copy(result.best))
    elif result.lines:
        parts.append(Text("Nothing fits, not even the smallest micro-batch", style="bold"))
    else:
        parts.append(Text("No way to run could be predicted", style="bold"))
    parts += [Text(f"{strategy}: {reason}") for strategy, reason in result.refused]
    parts += [Text(f"not tried: {way}: {reason}") for way, reason in result.not_tried]
    return Group(*parts)


def lines_table(
    lines: Sequence[SearchLine], best: SearchLine | None, refused: Sequence[str] = ()
) -> Table:
    """Render the lines of a search, the best one bold; and the ways that are not predicted."""
    has_lengths = len({line.sequence_length for line in lines}) > 1
    table = plain_table(*(each for each in _HEADINGS if has_lengths or each != "length"))
    table.columns[0].no_wrap = True
    for line in lines:
        table.add_row(*_cells(line, has_lengths), style="bold" if line == best else None)
    for name in refused:
        strategy, _, checkpointing = name.partition(WITH_CHECKPOINTING)
        length = [""] if has_lengths else []
        table.add_row(strategy, "on" if checkpointing else "off", *length, "not predicted")
    return table


def _cells(line: SearchLine, has_lengths: bool) -> list[str]:
    length = [str(line.sequence_length)] if has_lengths else []
    return [
        line.strategy,
        "on" if line.gradient_checkpointing else "off",
        *length,
        str(line.micro_batch) if line.fits else "none fits",
        str(line.accumulation_steps) if line.fits else "",
        f"{line.reserved_peak_bytes / GIB:.2f}",
        f"{line.margin_bytes / GIB:.2f}",
        f"{line.host_ram_bytes_per_node / GIB:.2f}",
        "all" if line.in_full else "a few",
    ]


def line_in_words(line: SearchLine) -> str:
    """Say in one line what was found for one way to run."""
    checkpointing = WITH_CHECKPOINTING if line.gradient_checkpointing else ""
    begin = f"{line.strategy}{checkpointing}, {line.sequence_length} tokens"
    if not line.fits:
        return f"{begin}: {size(-line.margin_bytes)} short with {line.micro_batch} row(s) at once"
    steps = f"{line.micro_batch} x {line.accumulation_steps} rows"
    bus = f"; {at_least(line.copy_seconds_per_step)}" if line.copy_seconds_per_step else ""
    return f"{begin}: {steps} fit, {size(line.margin_bytes)} to spare{bus}"


def _to_copy(best: SearchLine) -> list[str]:
    """Return the best line's settings, and why it is the best: by memory, not speed."""
    lines = [
        "Best: the most tokens in a forward pass of one card, preferably without offload; among"
        " equals, without checkpointing, then the simplest strategy, then the longest rows. Speed"
        " is not predicted",
        f"  flags   {best.flags}",
        f"  Hydra   {best.hydra_overrides}",
        f"  length  {best.sequence_length} tokens in each row",
    ]
    if not best.is_safe:
        lines.append("  It may fail: the margin is below the planner's known error")
    if best.strategy == STREAMED:
        lines.append(f"  stream  the callback StreamBase; {at_least(best.copy_seconds_per_step)}")
    elif best.strategy != AS_GIVEN:
        launch = f"trainer-plugins configs copy {best.strategy}"
        lines.append(f"  launch  accelerate's config {best.strategy} ({launch})")
    return lines


def changes_report(plan: MemoryPlan, saved: Sequence[Saved]) -> RenderableType:
    """Render what each switch would save."""
    numbers = ("allocated saved", "reserved saved", "nvidia-smi then", "fits then")
    table = plain_table("switch", *numbers, "with", left=("with",))
    for each in saved:
        if each.reason is not None:
            table.add_row(each.change, "", "", "", "", each.reason)
            continue
        table.add_row(
            each.change,
            size_or_blank(each.allocated_saved_bytes),
            size_or_blank(each.reserved_saved_bytes),
            size_or_blank(each.nvidia_smi_peak_bytes),
            {True: "yes", False: "no", None: ""}[each.fits],
            each.how,
        )
    allocated, reserved = size(plan.allocated_peak_bytes), size(plan.reserved_peak_bytes)
    heading = f"The run as it is: allocated {allocated}, reserved {reserved}. Each switch alone:"
    return Group(Text(heading, style="bold"), table)
