"""Finds memory that other processes hold on our card, by bytes rather than by process name."""

import os
from collections.abc import Collection
from importlib.metadata import version

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.advice.vendors import vendor_of
from trainer_plugins.devices import GpuProcess
from trainer_plugins.finding import Finding
from trainer_plugins.reading import MemoryReading
from trainer_plugins.units import GIB, MIB, size


def tolerance_bytes(total_bytes: int) -> int:
    """Return the normal drift of memory outside torch: cuBLAS, NCCL and CUDA graphs use it too."""
    return min(512 * MIB, total_bytes // 20)


def context_allowance_bytes(total_bytes: int) -> int:
    """Return an allowance for CUDA's context, kernels and NCCL; we have seen 0.3 to 1 GiB."""
    return min(3 * GIB // 2, total_bytes // 10)


def foreign_memory(
    reading: MemoryReading,
    ours_outside_torch_bytes: int,
    processes: tuple[GpuProcess, ...] | None,
    own_pids: Collection[int],
) -> Finding | None:
    """Judge the memory that other processes hold; before a launch there are no `own_pids`."""
    listed = processes or ()
    known_bytes = {each.pid: each.used_bytes for each in listed if each.used_bytes is not None}
    # The list is complete only if it includes us: in a container it may hold the host's pids.
    if any(pid in known_bytes for pid in own_pids) or (listed and not own_pids):
        used_bytes = reading.total_bytes - reading.free_bytes
        foreign_bytes = used_bytes - sum(known_bytes.get(pid, 0) for pid in own_pids)
        others = [_describe(each) for each in listed if each.pid not in own_pids]
        who = ", ".join(others) or "held by a process that the driver does not list"
    else:
        foreign_bytes, others = reading.non_torch_bytes - ours_outside_torch_bytes, []
        who = "the driver does not list the processes: judged by bytes alone"
    if foreign_bytes < tolerance_bytes(reading.total_bytes):
        return None
    return Finding.warning(
        code="foreign-memory",
        summary=f"other processes hold {size(foreign_bytes)} of {reading.device}",
        evidence=f"{who}; {size(reading.free_bytes)} of {size(reading.total_bytes)} free",
        remedy=_remedy(reading.device, is_listed=bool(others)),
        amount=float(foreign_bytes),
        data={
            "foreign_bytes": foreign_bytes,
            "free_bytes": reading.free_bytes,
            "total_bytes": reading.total_bytes,
        },
    )


def helpers(processes: tuple[GpuProcess, ...] | None, own_pids: Collection[int]) -> str:
    """List the other processes of this run on its card; empty if the driver lists none."""
    # DCP's helper processes, and ranks that open a context on the first card (pytorch#151030).
    return ", ".join(
        _describe(each)
        for each in processes or ()
        if each.pid in own_pids and each.pid != os.getpid()
    )


def _remedy(device: str, is_listed: bool) -> str:
    find = f"Find that process: {advice.LIST_PROCESSES.flag(Door.SHELL)}. "
    remedy = (
        f"Move this run to another card ({advice.OTHER_CARD.flag(Door.ENVIRONMENT)}), or stop that"
        f" process if it is yours ({advice.END_PROCESS.flag(Door.SHELL)}). Do not empty the cache:"
        " it reserves memory for this run."
    )
    return vendor_of(device, version("torch")).translate(remedy if is_listed else find + remedy)


def _describe(process: GpuProcess) -> str:
    held = "size unknown" if process.used_bytes is None else size(process.used_bytes)
    return f"pid {process.pid} ({process.name or 'name unknown'}): {held}"
