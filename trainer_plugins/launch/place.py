"""Describe where a process runs, for the record of a run and for a bug report."""

import os
import platform
import socket
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from trainer_plugins.allocator.machine import gather_machine
from trainer_plugins.allocator.variables import pick
from trainer_plugins.devices import HostDevice
from trainer_plugins.devices.nvml import NvmlError, cards_in_words, driver_version
from trainer_plugins.launch.masked import mask_text
from trainer_plugins.record.run_facts import Place, RunFacts

_LIMITS = ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_CPUS_ON_NODE")
_PACKAGES = (
    "trainer-plugins", "torch", "transformers", "accelerate", "trl", "peft", "deepspeed",
    "bitsandbytes", "liger-kernel", "flash-attn", "unsloth", "vllm", "datasets", "triton",
)  # fmt: skip
# Files in every Docker and Podman container (podman-run(1), "/run/.containerenv").
_CONTAINERS = (Path("/.dockerenv"), Path("/run/.containerenv"))
_JOBS = {
    "SLURM_JOB_ID": "Slurm",
    "PBS_JOBID": "PBS",
    "LSB_JOBID": "LSF",
    "RAY_JOB_ID": "Ray",
    "AZUREML_RUN_ID": "Azure ML",
}


def place() -> Place:
    """Describe where this process runs."""
    host = HostDevice()
    facts = host.facts()
    limits = {name: mask_text(os.environ[name]) for name in _LIMITS if name in os.environ}
    if gather_machine(os.environ).is_wsl:
        limits["WSL"] = platform.release()
    return Place(
        pid=os.getpid(),
        host=socket.gethostname(),
        job=job(os.environ),
        kernel=kernel(),
        num_oom_kills=facts.num_oom_kills,
        main_memory_bytes=host.read().total_bytes,
        shm_bytes=facts.shm_total_bytes,
        limits=limits,
    )


def job(environ: Mapping[str, str]) -> str:
    """Name the scheduler's job that this process belongs to; empty without one."""
    found = (f"{name} {environ[each]}" for each, name in _JOBS.items() if each in environ)
    return mask_text(next(found, ""))


def kernel() -> str:
    """Identify the machine, its boot and the control group: equal ones have comparable counters."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/cgroup"):
        with suppress(OSError):
            parts.append(Path(path).read_text().strip())
    return sha256("\n".join(parts).encode()).hexdigest()[:16]


def is_running(facts: RunFacts, here: Place) -> bool:
    """Return whether the process that wrote these facts still runs here."""
    if facts.place is None or facts.place.kernel != here.kernel:
        return False
    try:  # pids are reused: a process that began after the run is another one
        return bool(psutil.Process(facts.place.pid).create_time() <= facts.time_seconds)
    except psutil.Error:
        return False


def describe_place(environ: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the facts in groups for a bug report: no paths, no names of people, no secrets."""
    try:
        driver, cards = driver_version(), Counter(cards_in_words())
        shown = "; ".join(f"{count} x {card}" for card, count in cards.items())
        of_cards = {"driver": driver, "cards": shown or "none"}
    except NvmlError as error:
        of_cards = {"driver": f"none: {error}"}
    schedulers = {**_JOBS, "KUBERNETES_SERVICE_HOST": "Kubernetes"}
    around = [name for variable, name in schedulers.items() if variable in environ]
    if gather_machine(environ).is_wsl:
        around.append("WSL")
    if any(map(os.path.exists, _CONTAINERS)):
        around.append("a container")
    inside = ", ".join(around) or "none found"
    return {
        "versions": {"python": platform.python_version(), **read_versions()},
        "machine": {"system": platform.platform(), "inside": inside},
        "cards": of_cards,
        "allocator": {name: mask_text(text) for name, text in pick(environ).items()},
    }


def read_versions() -> dict[str, str]:
    """Return the versions of the packages that matter for memory, without importing them."""
    found = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
