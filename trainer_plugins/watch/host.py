"""Judges main memory, which ends a run with a bare 'Killed' or 'Bus error' when it is full."""

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.devices import HostFacts
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.reading import MemoryReading
from trainer_plugins.units import GIB, percent, size
from trainer_plugins.watch.pressure import Budget

SHM_FREE_FRACTION = 0.10

_FEWER_WORKERS = advice.FEWER_WORKERS.flag(Door.ARGUMENTS)


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
        remedy=f"To free main memory, {_FEWER_WORKERS}, keep the dataset on disk, or offload less.",
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
        remedy=f"A dataloader worker or another rank may be gone: {_FEWER_WORKERS}, offload less,"
        f" or raise the limit ({advice.MORE_MAIN_MEMORY.flag(Door.SHELL)}).",
        amount=float(num_kills),
    )


def shared_memory(facts: HostFacts) -> Finding | None:
    """Judge /dev/shm: when it is full, a dataloader worker dies of a bus error (SIGBUS)."""
    total_bytes, free_bytes = facts.shm_total_bytes, facts.shm_free_bytes
    if not total_bytes or free_bytes >= SHM_FREE_FRACTION * total_bytes:
        return None
    larger = advice.LARGER_SHM.flag(Door.SHELL, size=f"{max(16, 2 * total_bytes // GIB)}g")
    return Finding(
        code="shared-memory-full",
        severity=Severity.WARNING,
        summary="/dev/shm is nearly full; when it is full, dataloader workers die of a bus error",
        evidence=f"{size(free_bytes)} free of {size(total_bytes)}",
        remedy=f"To need less of it, {_FEWER_WORKERS}. To have more, restart the container:"
        f" {larger}",
        amount=float(total_bytes - free_bytes),
    )
