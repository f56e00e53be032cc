"""Judge main memory: free memory, /dev/shm, the limit of locked memory, swap, WSL."""

from collections.abc import Iterator

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.check.facts import Check, CheckLine, Facts, severity_of
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.units import GIB, MIB, size
from trainer_plugins.watch.pressure import Budget, host_pressure, judge_shared_memory

_PREFETCH = 2  # batches that each worker keeps ready: `prefetch_factor` of torch's DataLoader
_NO_SPILL = (
    "Set 'CUDA - Sysmem Fallback Policy' to 'Prefer No Sysmem Fallback' in NVIDIA's control panel"
)
# microsoft/WSL#11050: under WSL that policy has no effect
_NO_SPILL_IN_WSL = f"{advice.HEADROOM.flag(Door.CODE)} raises an OOM instead"
_SMALL_LOCK_BYTES = 64 * MIB  # `ulimit -l` is usually 64 KiB to 8 MiB, by distribution


def main_memory(facts: Facts) -> CheckLine | None:
    """Judge how much main memory is free, within the container's limit."""
    if facts.main is None:
        return None
    reading = facts.main.reading
    seen = f"{size(reading.free_bytes)} free of {size(reading.total_bytes)}"
    if reading.total_bytes < facts.main.machine_bytes:
        seen += f", the container's limit (the machine has {size(facts.main.machine_bytes)})"
    found = host_pressure(reading, Budget())
    return CheckLine("main memory", seen, (found,) if found else ())


def judge_shared(facts: Facts) -> CheckLine | None:
    """Judge /dev/shm by the batches that dataloader workers will put there."""
    if facts.main is None or not facts.main.shared.shm_total_bytes:
        return None
    there = facts.main.shared
    workers = facts.run.number("dataloader_num_workers", 0)
    prefetch = facts.run.number("dataloader_prefetch_factor", _PREFETCH)
    ranks, batch = facts.run.local_ranks, facts.data.batch_bytes
    need, free = ranks * workers * prefetch * batch, there.shm_free_bytes
    seen = f"{size(free)} free" + (f", {size(need)} needed" if need else "")
    if need <= free / 2:
        found = judge_shared_memory(there)
        return CheckLine("/dev/shm", seen, (found,) if found and need else ())
    larger = advice.LARGER_SHM.flag(Door.SHELL, size=f"{2 * need // GIB + 1}g")
    finding = Finding(
        code="shared-memory-small",
        severity=severity_of(need, free),
        summary=f"dataloader workers need {size(need)} of /dev/shm, but {size(free)} is free",
        evidence=f"{ranks} rank(s) x {workers} workers x {prefetch} batches of {size(batch)}; a"
        " worker that finds it full dies with a bus error",
        remedy=f"{larger}, or {advice.FEWER_WORKERS.flag(Door.TRAINER, workers=0)}",
        amount=float(need),
    )
    return CheckLine("/dev/shm", seen, (finding,))


def judge_locked_memory(facts: Facts) -> CheckLine | None:
    """Judge the limit of locked memory, if a library of this run locks memory."""
    limit = None if facts.main is None else facts.main.memlock_bytes
    if limit is None or limit >= _SMALL_LOCK_BYTES or not (who := ", ".join(_lockers(facts))):
        return None
    finding = Finding.warning(
        code="memlock-small",
        summary=f"a process may lock {size(limit)} of main memory, but {who} needs more",
        evidence=f"ulimit -l is {limit // 1024} KiB",
        remedy=advice.LOCK_MORE_MEMORY.flag(Door.SHELL),
        data={"limit_bytes": limit},
    )
    return CheckLine("locked memory", size(limit), (finding,))


def swap(facts: Facts) -> CheckLine | None:
    """Judge whether main memory is already being swapped out, before an offload fills it."""
    if facts.main is None or not (places := _offload(facts)):
        return None
    main = facts.main
    seen = f"{size(main.swap_used_bytes)} of {size(main.swap_bytes)} in use"
    if main.swap_used_bytes < max(GIB, main.swap_bytes // 4):
        return CheckLine("swap", seen)
    finding = Finding.warning(
        code="swap-in-use",
        summary=f"this run offloads {', '.join(places)}, but main memory already swaps",
        evidence=f"{seen}; {size(main.reading.free_bytes)} of main memory free",
        remedy="End other processes that use main memory, or offload less",
        data={
            "swap_used_bytes": main.swap_used_bytes,
            "swap_bytes": main.swap_bytes,
            "free_bytes": main.reading.free_bytes,
        },
    )
    return CheckLine("swap", seen, (finding,))


def wsl(facts: Facts) -> CheckLine | None:
    """Report the limits of Windows."""
    machine = facts.machine
    if not (machine.is_wsl or machine.is_windows):
        return None
    values = facts.run.values
    pins = bool(values) and values.get("dataloader_pin_memory") is not False
    finding = Finding(
        code="windows-limits",
        severity=Severity.WARNING if pins or _offload(facts) else Severity.INFO,
        summary="Windows moves data of a full GPU to main memory, which is very slow",
        evidence=f"{'WSL, which pins little' if machine.is_wsl else 'Windows'}"
        " (microsoft/WSL#11050, unsloth#338)",
        remedy=f"{_NO_SPILL_IN_WSL if machine.is_wsl else _NO_SPILL};"
        f" {advice.NO_PINNED_BATCHES.flag(Door.TRAINER)}",
    )
    return CheckLine("Windows", "", (finding,))


CHECKS: tuple[Check, ...] = (main_memory, judge_shared, judge_locked_memory, swap, wsl)


def _offload(facts: Facts) -> dict[str, str]:
    """Return the offloaded parts and their places, by the running strategy or the launch file."""
    strategy = facts.run.strategy
    return facts.document.offload_devices if strategy is None else dict(strategy.offload)


def _lockers(facts: Facts) -> Iterator[str]:
    # csrc/aio/py_lib/deepspeed_pin_tensor.cpp
    if "nvme" in _offload(facts).values():
        yield "DeepSpeed's offload to a drive"
    # docs.nvidia.com, NCCL, Troubleshooting, "Memory issues"
    if facts.run.strategy is not None and (facts.run.strategy.num_machines or 1) > 1:
        yield "NCCL over InfiniBand"
