"""Renders a plan for the terminal: whether it fits, what it is made of, how reliable it is."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.units import MIB, percent, size


def plan_report(plan: MemoryPlan) -> RenderableType:
    """Render the verdict, the figures, the peak by category, moments, tensors, and the doubts."""
    parts: list[RenderableType] = [
        Text(verdict(plan), style="bold"),
        *(Text(line, style="bold") for line in host_verdict(plan)),
        _figures(plan),
        _breakdown(plan),
        _moments(plan),
    ]
    parts.append(_tensors(plan))
    for heading, lines in (
        ("Not predicted", plan.not_predicted),
        ("Less reliable", plan.not_reliable),
        ("Assumed", plan.assumptions),
        ("Known error", (plan.known_error,) if plan.known_error else ()),
    ):
        parts += [Text(f"{heading}: {line}") for line in lines]
    parts.append(
        Text("With " + ", ".join(f"{name} {version}" for name, version in plan.versions.items()))
    )
    return Group(*parts)


def verdict(plan: MemoryPlan) -> str:
    """Say in one line whether the run fits."""
    peak = f"{size(plan.nvidia_smi_peak_bytes)} at the peak of each GPU, in the {plan.moment}"
    if plan.capacity_bytes is None or plan.margin_bytes is None:
        return f"Needs {peak}. Name a card with --gpu to learn whether that fits"
    card = f"{plan.gpu} ({size(plan.capacity_bytes)})"
    flushes = (
        f", after releasing the whole cache {plan.num_flushes} times" if plan.num_flushes else ""
    )
    if plan.fits_card:
        return f"Fits on {card}: {peak}, {size(plan.margin_bytes)} to spare{flushes}"
    failed = ""
    if plan.failed_request_bytes is not None:
        failed = (
            f": the allocator fails on {size(plan.failed_request_bytes)} for {plan.failed_request}"
        )
    return f"Does not fit on {card}{failed}. On a card of unlimited memory the peak would be {peak}"


def host_verdict(plan: MemoryPlan) -> list[str]:
    """Say in one line whether it fits in main memory; nothing if nobody said how much there is."""
    if plan.host_shortage is not None:
        return [f"Does not fit in main memory: {plan.host_shortage}"]
    if plan.host_capacity_bytes is None:
        return []
    left = plan.host_capacity_bytes - plan.host_bytes_per_node
    return [
        f"Fits in {size(plan.host_capacity_bytes)} of main memory: "
        f"{size(plan.host_bytes_per_node)} on a machine, {size(left)} to spare"
    ]


def _figures(plan: MemoryPlan) -> Table:
    table = _table("", "a GPU")
    table.add_row("allocated (max_memory_allocated)", size(plan.allocated_peak_bytes))
    table.add_row("reserved (max_memory_reserved)", size(plan.reserved_peak_bytes))
    table.add_row("nvidia-smi: reserved plus the context", size(plan.nvidia_smi_peak_bytes))
    pinned = (
        f", {size(plan.host_pinned_bytes_per_node)} of it pinned"
        if plan.host_pinned_bytes_per_node
        else ""
    )
    table.add_row("host RAM per node, for tensors", size(plan.host_ram_bytes_per_node) + pinned)
    table.add_row(
        "host RAM per node, with Python and its libraries", size(plan.host_bytes_per_node)
    )
    trainable = f"{plan.num_trainable_parameters:,} of {plan.num_parameters:,}"
    table.add_row("trainable parameters", trainable)
    return table


def _breakdown(plan: MemoryPlan) -> Table:
    table = _table(f"allocated at the peak ({plan.moment})", "", "")
    for category, num_bytes in sorted(plan.breakdown.items(), key=lambda pair: -pair[1]):
        if num_bytes * 20 < MIB:
            continue  # a few buffers, which would show as 0.0 MiB
        share = num_bytes / plan.allocated_peak_bytes if plan.allocated_peak_bytes else 0.0
        table.add_row(category, size(num_bytes), percent(share))
    return table


def _moments(plan: MemoryPlan) -> Table:
    table = _table("moment", "allocated", "reserved")
    for moment, peak in plan.moments.items():
        table.add_row(moment, size(peak.allocated_bytes), size(peak.reserved_bytes))
    return table


def _tensors(plan: MemoryPlan) -> Table:
    table = _table("largest at the peak", "", "made by")
    for tensor in plan.top_tensors:
        shape = f"{tensor.dtype}{list(tensor.shape)} by " if tensor.shape else ""
        made_by = f"{shape}{tensor.operation.removeprefix('aten::')} in the {tensor.moment}"
        table.add_row(
            tensor.category, size(tensor.num_bytes), f"{made_by}, {tensor.module or 'the model'}"
        )
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(first)
    for other in others:
        table.add_column(other, justify="left" if other == "made by" else "right", overflow="fold")
    return table
