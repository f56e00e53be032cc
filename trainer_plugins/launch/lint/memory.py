"""Judges the main memory that a launch needs against what the machine has."""

from collections.abc import Iterator

from trainer_plugins.finding import Finding, Severity
from trainer_plugins.launch.lint.document import Document
from trainer_plugins.launch.lint.offload import host_need, ranks_of
from trainer_plugins.launch.main_memory import HostLimits
from trainer_plugins.units import GIB, size

_NEARLY = 0.8


def memory_findings(
    document: Document, num_params: float | None, num_ranks: int | None, host: HostLimits
) -> Iterator[Finding]:
    """Judge the main memory of a machine by the parameters and the ranks of a launch."""
    if num_params is None or (document.accelerate is None and document.deepspeed is None):
        return
    ranks = num_ranks or ranks_of(document)
    need = host_need(document, num_params, ranks)
    shortage = host.shortage(need)
    is_near = host.total_bytes is not None and need.total_bytes > _NEARLY * host.total_bytes
    if shortage is None and not is_near:
        return
    plural = "s" if need.num_ranks > 1 else ""
    pinned = f", {size(need.pinned_bytes)} of it pinned" if need.pinned_bytes else ""
    save = f", {size(need.save_bytes)} that a save gathers" if need.save_bytes else ""
    yield Finding(
        code="config-host-memory",
        severity=Severity.WARNING if shortage is None else Severity.ERROR,
        summary=shortage
        or f"it needs {size(need.total_bytes)} of main memory on a machine, "
        f"which has {size(host.total_bytes or 0)}",
        evidence=f"{need.tensor_bytes / num_params:.1f} B for each of {num_params:.3g} parameters"
        f"{pinned}{save}, and {size(need.process_bytes)} for Python and its libraries, with "
        f"{need.num_ranks} rank{plural} on a machine",
        remedy="Spread it over more machines; keep bf16 states (the config one_gpu_7b_offload); "
        "set pin_memory to false, since pinned tensors take powers of two; put the optimizer on "
        "NVMe (zero3_offload_nvme); or train adapters",
        amount=need.total_bytes / GIB,
    )
