"""Describes where a process runs, and tells whether a recorded run is still there."""

import os
import platform
import socket
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import psutil

from trainer_plugins.allocator.gather import gather_machine
from trainer_plugins.devices import HostDevice
from trainer_plugins.launch.masked import masked_text
from trainer_plugins.record.run_facts import Place, RunFacts

_LIMITS = (
    "SLURM_JOB_ID",
    "SLURM_MEM_PER_NODE",
    "SLURM_MEM_PER_CPU",
    "SLURM_MEM_PER_GPU",
    "SLURM_CPUS_ON_NODE",
)


def place() -> Place:
    """Describe where this process runs."""
    host = HostDevice()
    facts = host.facts()
    limits = {name: masked_text(os.environ[name]) for name in _LIMITS if name in os.environ}
    if gather_machine(os.environ).is_wsl:
        limits["WSL"] = platform.release()
    return Place(
        pid=os.getpid(),
        kernel=kernel(),
        num_oom_kills=facts.num_oom_kills,
        main_memory_bytes=host.read().total_bytes,
        shm_bytes=facts.shm_total_bytes,
        limits=limits,
    )


def kernel() -> str:
    """Name the machine, its boot and the control group: counters are comparable if it is equal."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/cgroup"):
        with suppress(OSError):
            parts.append(Path(path).read_text().strip())
    return sha256("\n".join(parts).encode()).hexdigest()[:16]


def is_running(facts: RunFacts, here: Place) -> bool:
    """Return whether the process that wrote these facts still runs here.

    Process numbers are reused: a process that began after the run is another one.
    """
    if facts.place is None or facts.place.kernel != here.kernel:
        return False
    try:
        return bool(psutil.Process(facts.place.pid).create_time() <= facts.time_seconds)
    except psutil.Error:
        return False
