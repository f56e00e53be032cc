"""Render a plan for the terminal: in five lines, or in full."""

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from trainer_plugins.allocator.model import SMALL_SEGMENT_BYTES
from trainer_plugins.planner.plan import (
    MemoryPlan,
    Moment,
    Proposal,
    TensorsAtPeak,
    describe_least_seconds,
    peak_until_resume,
)
from trainer_plugins.report.page import plain_table, to_paste
from trainer_plugins.units import MIB, count_in_words, percent, size

_MUCH_MAIN_MEMORY = 4 << 30  # a change that takes this much more says so
_SHOWN = ("batch", "length", "dtype", "checkpointing", "card")  # the parts of `planned` to show
_LIMITS = ("cut", "missed")  # its parts that limit the verdict
_SHOWN_BYTES = MIB / 20  # smaller sizes would show as 0.0 MiB
WHEN: Mapping[Moment, str] = {
    "load": "while loading",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer step": "in the optimizer step",
    "evaluation": "during evaluation",
    "generation": "during generation",
    "save": "while saving",
    "resume": "while resuming",
}


def brief_report(plan: MemoryPlan) -> RenderableType:
    """Render the answer: the verdict, the planned run, the largest uses of memory, the remedy."""
    parts = [*_verdicts(plan), *map(Text, _weights_alone(plan))]
    if shown := {name: plan.planned[name] for name in _SHOWN if name in plan.planned}:
        parts.append(_label("Planned", _list(shown)))
    parts.append(_label("Peak", name_largest(plan)))
    if plan.failed_request is not None:
        parts.append(
            _label("Fails", f"{size(plan.failed_request_bytes or 0)} for {plan.failed_request}")
        )
    parts += _render_remedy(plan)
    parts += [_label("Accuracy", plan.known_error)] if plan.known_error else []
    counts = {"assumption": len(plan.assumptions) + len(plan.not_reliable)}
    counts["suggestion"] = len(plan.proposals) - 1
    more = (count_in_words(num, name) for name, num in counts.items() if num > 0)
    return Group(*parts, _label("More", f"{', '.join(more) or 'all figures'}: --verbose"))


def plan_report(plan: MemoryPlan) -> RenderableType:
    """Render the verdict, the figures, the peak by category, moments, tensors and caveats."""
    parts = [*_verdicts(plan), *map(Text, details(plan))]
    if plan.planned:
        parts.append(Text(f"Planned: {describe_planned(plan)}"))
    if "command" in plan.planned:
        parts.append(to_paste(f"Again: {plan.planned['command']}"))
    parts += [_figures(plan), _breakdown(plan), _moments(plan), _tensors(plan)]
    for heading, lines in (
        ("Less reliable", plan.not_reliable),
        ("Assumed", plan.assumptions),
        ("Known error", (plan.known_error,) if plan.known_error else ()),
    ):
        parts += [Text(f"{heading}: {line}") for line in lines]
    versions = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    return Group(*parts, Text(f"With {versions}"), *_proposals(plan))


def _verdicts(plan: MemoryPlan) -> list[RenderableType]:
    style = {True: "bold green", False: "bold red", None: "bold"}[plan.fits]
    host = (Text(line, style="bold") for line in host_verdict(plan))
    return [Text(verdict(plan), style=style), *host]


def _label(label: str, text: str) -> Table:
    row = Table.grid(Column(style="bold", width=10), Column())
    row.add_row(label, text)
    return row


def verdict(plan: MemoryPlan) -> str:
    """Say in one line whether the run fits; without a card, the memory of its tensors."""
    said = _verdict_of_card(plan)
    if plan.host_shortage is not None and plan.fits_card is not False:
        said = f"Does not fit in main memory. It {said[0].lower()}{said[1:]}"
    return "; ".join([said, *(plan.planned[each] for each in _LIMITS if each in plan.planned)])


def _verdict_of_card(plan: MemoryPlan) -> str:
    if plan.capacity_bytes is None or plan.margin_bytes is None:
        return f"Needs {size(plan.allocated_peak_bytes)}, {WHEN[plan.moment]}"
    named = plan.gpu or "the card"
    card = named if named[0].isdigit() else f"{named} ({size(plan.capacity_bytes)})"
    if plan.fits_card:
        return f"Fits on {card}: {size(plan.margin_bytes)} to spare, {WHEN[plan.moment]}"
    short = f"{size(-plan.margin_bytes)} short"
    if plan.smallest_card_bytes is None:  # reserved includes a cache, which a full card flushes
        live_short = plan.allocated_peak_bytes + plan.context_bytes - plan.capacity_bytes
        if live_short <= 0:
            piece = max(plan.failed_request_bytes or 0, SMALL_SEGMENT_BYTES)
            short = f"no contiguous {size(piece)} free"
        elif 2 * live_short < -plan.margin_bytes:
            short = f"at least {size(live_short)} short"
    return f"Does not fit on {card}: {short}, {WHEN[plan.moment]}"


def name_largest(plan: MemoryPlan) -> str:
    """Name the three largest categories at the peak."""
    most = sorted(plan.breakdown.items(), key=lambda pair: -pair[1])[:3]
    named = ", ".join(f"{size(num)} {name}" for name, num in most if num >= _SHOWN_BYTES)
    needed, held = plan.smallest_card_bytes, plan.nvidia_smi_peak_bytes
    if needed and plan.capacity_bytes and held > plan.capacity_bytes:
        # a full card has no cache
        return f"{named}; the run needs a card with at least {size(needed)}"
    return f"{named}; in all, with the cache and CUDA's context, {size(held)}"


def _render_remedy(plan: MemoryPlan) -> list[RenderableType]:
    """Render the first change with which it fits, or the most rows at once if it fits already."""
    if plan.proposals:
        first = plan.proposals[0]
        words = f"{', '.join(first.changes)}: {size(first.margin_bytes)} to spare"
        if first.host_ram_bytes_per_node > plan.host_ram_bytes_per_node + _MUCH_MAIN_MEMORY:
            words += f", {size(first.host_ram_bytes_per_node)} of main memory"
        return [
            _label("Try", f"{words}. Cost: {first.price}"),
            to_paste(f"{' ' * 10}{first.flags}"),
            *_render_for_the_run(first, 10),
        ]
    if plan.tried_without_success:
        tried = "; ".join(plan.tried_without_success)
        return [_label("Tried", f"none of these fits: {tried}")]
    return []


def _render_for_the_run(proposal: Proposal, indent: int) -> list[Text]:
    """Render the text to type in the run itself, if it differs from the plan's flags."""
    if proposal.in_the_run == proposal.flags:
        return []
    return [to_paste(f"{' ' * indent}In the run: {proposal.in_the_run}")]


def details(plan: MemoryPlan) -> list[str]:
    """List the figures behind the verdict."""
    whose = f"the fullest of {len(plan.cards)} cards" if plan.cards else "each GPU"
    peak = f"{size(plan.nvidia_smi_peak_bytes)} at the peak of {whose}"
    cached = size(plan.reserved_peak_bytes - plan.allocated_peak_bytes)
    lines = []
    if plan.capacity_bytes is None:
        lines.append(
            f"{size(plan.allocated_peak_bytes)} of tensors at the peak of {whose}, and up to"
            f" {cached} of cached blocks, which a full card releases. To see whether it fits,"
            " name a card with --gpu"
        )
    elif plan.fits_card:
        times = f", after releasing the whole cache {plan.num_flushes} times"
        lines.append(peak + times if plan.num_flushes else peak)
    else:
        lines.append(f"On a card with unlimited memory: {peak}, {cached} of it cached blocks")
        lines += _weights_alone(plan)
        if plan.failed_request_bytes is not None:
            failed = f"{size(plan.failed_request_bytes)} for {plan.failed_request}"
            lines.append(f"The allocation that fails: {failed}")
    if plan.smallest_card_bytes is not None:
        fails = f"; a smaller one fails in {plan.fails_on_less}" if plan.fails_on_less else ""
        lines.append(f"The smallest card that works has {size(plan.smallest_card_bytes)}{fails}")
    if (base := plan.streamed) is not None:
        lines.append(
            f"The frozen base, {size(base.num_bytes)} in {base.num_layers} layers, is"
            f" streamed: {base.resident_layers} of them stay on the card. Each step copies"
            f" {size(base.copied_bytes_per_step)} over the bus:"
            f" {describe_least_seconds(base.copy_seconds_per_step)}"
        )
    return lines


def _weights_alone(plan: MemoryPlan) -> list[str]:
    """Warn in one line that the loaded model alone exceeds the card, if it does."""
    loaded, room = plan.loaded_bytes, (plan.capacity_bytes or 0) - plan.context_bytes
    if plan.fits_card is not False or loaded is None or loaded <= room:
        return []
    return [f"The loaded model alone takes {size(loaded)}: a smaller batch cannot help"]


def describe_planned(plan: MemoryPlan) -> str:
    """Describe the planned run in one line, without the command."""
    return _list({name: text for name, text in plan.planned.items() if name != "command"})


def _list(named: Mapping[str, str]) -> str:
    return "; ".join(f"{name} {text}" for name, text in named.items())


def _proposals(plan: MemoryPlan) -> list[Text]:
    """Render the changes with which it fits: the flags of each on one line, to be copied."""
    lines: list[Text] = []
    if plan.proposals:
        rows = "the effective batch size stays the same"
        lines.append(Text(f"These changes would fit; {rows}:", style="bold"))
    for each in plan.proposals:
        numbers = f"{size(plan.count_needed(each))}, {size(each.margin_bytes)} to spare"
        host = f", {size(each.host_ram_bytes_per_node)} of main memory"
        lines.append(Text(f"- {', '.join(each.changes)}: {numbers}{host}", style="green"))
        lines += [Text(f"  Cost: {each.price}"), to_paste(f"  {each.flags}")]
        lines += _render_for_the_run(each, 2)
    if plan.tried_without_success:
        heading = "Not enough" if plan.proposals else "None of these fits"
        lines.append(Text(f"{heading}: {'; '.join(plan.tried_without_success)}"))
    return lines


def host_verdict(plan: MemoryPlan) -> list[str]:
    """Say in one line whether it fits in main memory; nothing if that size is unknown."""
    if plan.host_shortage is not None:
        return [f"Does not fit: {plan.host_shortage}"]
    if plan.host_capacity_bytes is None:
        return []
    left = size(plan.host_capacity_bytes - plan.host_bytes_per_node)
    used = f"{size(plan.host_bytes_per_node)} per node, {left} to spare"
    return [f"Fits in {size(plan.host_capacity_bytes)} of main memory: {used}"]


def _figures(plan: MemoryPlan) -> Table:
    table = plain_table("", "a GPU")
    table.add_row("allocated (max_memory_allocated)", size(plan.allocated_peak_bytes))
    table.add_row("reserved (max_memory_reserved)", size(plan.reserved_peak_bytes))
    table.add_row("nvidia-smi: reserved plus context", size(plan.nvidia_smi_peak_bytes))
    tensors = size(plan.host_ram_bytes_per_node)
    never_resumed = size(peak_until_resume(plan.host_moments))
    if plan.host_moments and never_resumed != tensors:
        tensors = f"{never_resumed} ({tensors} when resuming)"
    if plan.host_pinned_bytes_per_node:
        tensors += f"; {size(plan.host_pinned_bytes_per_node)} pinned"
    table.add_row("CPU RAM per node, tensors", tensors)
    everything = size(plan.host_bytes_per_node)
    table.add_row("CPU RAM per node, with Python and libraries", everything)
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
        made_by = f"{group.operation} {WHEN[group.moment]}"
        table.add_row(words_of(group), f"{size(group.num_bytes)}{times}", made_by)
    return table


def words_of(group: TensorsAtPeak) -> str:
    """Describe equal tensors, with the model's own module name.

    >>> group = dict(count=1, num_bytes=8, moment="forward", part="lm_head", operation="a.py:3 f")
    >>> words_of(TensorsAtPeak(category="frozen weights", **group))
    'frozen weights of lm_head'
    """
    if group.category == "activations":
        what = f"results of {group.operation}"
        return f"{what} in {group.part}" if group.part else what
    return f"{group.category} of {group.part}" if group.part else group.category
