"""Finds foreign memory: what other processes hold on our card.

Bytes decide; the names of processes only help the reader.
"""

from collections.abc import Collection

from trainer_plugins.devices import GpuProcess
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.reading import MemoryReading
from trainer_plugins.units import GIB, MIB, size


def tolerance_bytes(total_bytes: int) -> int:
    """Return how far memory outside torch may move: cuBLAS, NCCL and CUDA graphs grow it too."""
    return min(512 * MIB, total_bytes // 20)


def context_allowance_bytes(total_bytes: int) -> int:
    """Return what a process may hold outside torch from the start.

    That is the CUDA context, loaded kernels and NCCL; 0.3 to 1 GiB were seen.
    """
    return min(3 * GIB // 2, total_bytes // 10)


def foreign_memory(
    reading: MemoryReading,
    ours_outside_torch_bytes: int,
    processes: tuple[GpuProcess, ...] | None,
    own_pids: Collection[int],
) -> Finding | None:
    """Judge how much of the card others hold.

    Args:
        reading: the card now.
        ours_outside_torch_bytes: what we may hold outside torch, used if the driver does not list
            us.
        processes: what the driver lists, if anything.
        own_pids: the processes of this run on this machine; before a launch there are none.
    """
    listed = processes or ()
    known_bytes = {
        process.pid: process.used_bytes for process in listed if process.used_bytes is not None
    }
    used_bytes = reading.total_bytes - reading.free_bytes
    # A list tells about others only if it knows us: in a container its pids may be the host's, or
    # processes may be missing.
    if any(pid in known_bytes for pid in own_pids) or (listed and not own_pids):
        foreign_bytes = used_bytes - sum(known_bytes.get(pid, 0) for pid in own_pids)
        others = [process for process in listed if process.pid not in own_pids]
        who = ", ".join(
            f"pid {p.pid} ({p.name or 'name unknown'}): "
            f"{'size unknown' if p.used_bytes is None else size(p.used_bytes)}"
            for p in others
        )
        who = who or "by a process that the driver does not list"
    else:
        foreign_bytes = reading.non_torch_bytes - ours_outside_torch_bytes
        who = "the driver does not say who: judged by bytes alone"
    if foreign_bytes < tolerance_bytes(reading.total_bytes):
        return None
    return Finding(
        code="foreign-memory",
        severity=Severity.WARNING,
        summary=f"other processes hold {size(foreign_bytes)} of {reading.device}",
        evidence=f"{who}; {size(reading.free_bytes)} of {size(reading.total_bytes)} free",
        remedy=(
            "Stop that process or move this run to another card. Do not empty the cache: it is this"
            " run's reservation."
        ),
        amount=float(foreign_bytes),
    )
