"""Judges main memory, which ends a run with a bare 'Killed' or 'Bus error' when it is full."""

from trainer_plugins.devices import HostFacts
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.reading import MemoryReading
from trainer_plugins.units import percent, size
from trainer_plugins.watch.pressure import Budget

SHM_FREE_FRACTION = 0.10


def host_pressure(reading: MemoryReading, budget: Budget) -> Finding | None:
    """Compare main memory, or the container's limit, with a budget."""
    used_fraction = 1 - reading.free_bytes / reading.total_bytes
    severity = budget.severity(used_fraction)
    if severity is None:
        return None
    return Finding(
        code="host-memory-pressure",
        severity=severity,
        summary=f"main memory is {percent(used_fraction)} full; at 100% the kernel kills processes,"
        " without a traceback",
        evidence=f"this process {size(reading.allocated_bytes)}, free {size(reading.free_bytes)} of"
        f" {size(reading.total_bytes)}",
        remedy="Lower dataloader_num_workers, keep the dataset on disk, or offload less.",
        amount=used_fraction,
    )


def oom_kills(before: HostFacts, now: HostFacts) -> Finding | None:
    """Judge whether the kernel has killed a process of this container since an earlier look."""
    num_kills = now.num_oom_kills - before.num_oom_kills
    if num_kills <= 0:
        return None
    return Finding(
        code="host-oom-kill",
        severity=Severity.ERROR,
        summary=f"the kernel has killed {num_kills} process(es) of this container because main"
        " memory ran out",
        evidence=f"oom_kill of the control group rose from {before.num_oom_kills} to"
        f" {now.num_oom_kills}",
        remedy="A dataloader worker or another rank may be gone: raise the container's memory"
        " limit, or offload less.",
        amount=float(num_kills),
    )


def shared_memory(facts: HostFacts) -> Finding | None:
    """Judge /dev/shm: when it is full, a dataloader worker dies of a bus error (SIGBUS)."""
    total_bytes, free_bytes = facts.shm_total_bytes, facts.shm_free_bytes
    if not total_bytes or free_bytes >= SHM_FREE_FRACTION * total_bytes:
        return None
    return Finding(
        code="shared-memory-full",
        severity=Severity.WARNING,
        summary="/dev/shm is nearly full; when it is full, dataloader workers die of a bus error",
        evidence=f"{size(free_bytes)} free of {size(total_bytes)}",
        remedy="Start the container with a larger --shm-size, or lower dataloader_num_workers.",
        amount=float(total_bytes - free_bytes),
    )
