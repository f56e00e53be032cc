"""Judges how full a device, main memory and /dev/shm are."""

from dataclasses import dataclass

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.devices import HostFacts
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.reading import MemoryReading
from trainer_plugins.units import GIB, percent, size

SHM_FREE_FRACTION = 0.10


@dataclass(frozen=True, slots=True)
class Budget:
    """Two limits for a device, as fractions of its total memory."""

    warn_fraction: float = 0.90
    act_fraction: float = 0.97

    def __post_init__(self) -> None:
        if not 0 < self.warn_fraction <= self.act_fraction <= 1:
            raise ValueError(
                "a budget needs 0 < warn_fraction <= act_fraction <= 1, "
                f"got warn_fraction={self.warn_fraction}, act_fraction={self.act_fraction}"
            )

    def severity(self, fraction: float) -> Severity | None:
        """Return the severity of using this fraction of the device; None if it is within budget."""
        if fraction < self.warn_fraction:
            return None
        return Severity.ERROR if fraction >= self.act_fraction else Severity.WARNING


_FEWER_WORKERS = advice.FEWER_WORKERS.flag(Door.ARGUMENTS)
_SMALLER_EVAL_BATCH = advice.SMALLER_EVAL_BATCH.flag(Door.ARGUMENTS)
# The remedy depends on the activity at the peak.
_REMEDIES = {
    "eval": f"To lower this peak, {_SMALLER_EVAL_BATCH}, set"
    f" {advice.OUTPUTS_TO_MAIN_MEMORY.flag(Door.ARGUMENTS, steps=1)}, or, if metrics need no"
    f" logits, pass {advice.EVALUATION_GUARD.flag(Door.CODE)}.",
    "generate": f"To lower this peak, {_SMALLER_EVAL_BATCH} (in TRL's online trainers, the training"
    " batch), or the number of generated tokens: the KV cache grows with both.",
    "save": f"To lower this peak, set {advice.SAVE_ONLY_MODEL.flag(Door.ARGUMENTS)}, or save a"
    f" sharded state dict ({advice.SHARDED_SAVE.flag(Door.ACCELERATE)}), so that no rank gathers"
    " the full model.",
    "train": f"To lower this peak, {advice.SMALLER_MICRO_BATCH.flag(Door.ARGUMENTS)} (the effective"
    " batch stays the same, the gradient too unless `gradient-summed` is about your loss), or set"
    f" {advice.CHECKPOINTING.flag(Door.ARGUMENTS)}.",
}


def pressure(reading: MemoryReading, budget: Budget, moment: str) -> Finding | None:
    """Compare a reading's peak, including other processes' memory, with a budget."""
    severity = budget.severity(reading.pressure)
    if severity is None:
        return None
    return Finding(
        code="memory-pressure",
        severity=severity,
        summary=f"{reading.device} was {percent(reading.pressure)} full at its peak in {moment}",
        evidence=f"peak allocated {size(reading.peak_allocated_bytes)}, non-torch"
        f" {size(reading.non_torch_bytes)}, total {size(reading.total_bytes)}",
        remedy=_REMEDIES.get(moment, _REMEDIES["train"]),
        amount=reading.pressure,
        data={
            "peak_allocated_bytes": reading.peak_allocated_bytes,
            "non_torch_bytes": reading.non_torch_bytes,
            "total_bytes": reading.total_bytes,
        },
    )


def host_pressure(reading: MemoryReading, budget: Budget) -> Finding | None:
    """Compare the use of main memory, or of the container's limit, with a budget."""
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
        data={
            "process_bytes": reading.allocated_bytes,
            "free_bytes": reading.free_bytes,
            "total_bytes": reading.total_bytes,
        },
    )


def oom_kills(before: HostFacts, now: HostFacts) -> Finding | None:
    """Report processes of this container that the kernel killed since an earlier look."""
    num_kills = now.num_oom_kills - before.num_oom_kills
    if num_kills <= 0:
        return None
    return Finding.error(
        code="host-oom-kill",
        summary=f"the kernel has killed {num_kills} process(es) of this container because main"
        " memory ran out",
        evidence=f"oom_kill of the control group rose from {before.num_oom_kills} to"
        f" {now.num_oom_kills}",
        remedy=f"A dataloader worker or another rank may be gone: {_FEWER_WORKERS}, offload less,"
        f" or raise the limit ({advice.MORE_MAIN_MEMORY.flag(Door.SHELL)}).",
        amount=float(num_kills),
        data={"num_kills": num_kills},
    )


def judge_shared_memory(facts: HostFacts) -> Finding | None:
    """Judge /dev/shm. When it is full, a dataloader worker dies of a bus error (SIGBUS)."""
    total_bytes, free_bytes = facts.shm_total_bytes, facts.shm_free_bytes
    if not total_bytes or free_bytes >= SHM_FREE_FRACTION * total_bytes:
        return None
    larger = advice.LARGER_SHM.flag(Door.SHELL, size=f"{max(16, 2 * total_bytes // GIB)}g")
    return Finding.warning(
        code="shared-memory-full",
        summary="/dev/shm is nearly full; once it is full, dataloader workers die with a bus error",
        evidence=f"{size(free_bytes)} free of {size(total_bytes)}",
        remedy=f"To use less of it, {_FEWER_WORKERS}. To get more, restart the container: {larger}",
        amount=float(total_bytes - free_bytes),
        data={"free_bytes": free_bytes, "total_bytes": total_bytes},
    )
