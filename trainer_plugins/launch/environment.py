"""Choose the variables to export before a launch on this machine, with a reason for each."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from trainer_plugins.allocator.lint import choose, lint
from trainer_plugins.allocator.machine import gather_machine
from trainer_plugins.allocator.variables import pick
from trainer_plugins.finding import Finding
from trainer_plugins.launch.extensions import lock_findings, read_locks


@dataclass(frozen=True, slots=True)
class Export:
    """Holds one variable to export, and its purpose."""

    name: str
    value: str
    purpose: str


@dataclass(frozen=True, slots=True)
class LaunchEnvironment:
    """Holds the exports, the reason for the allocator settings, and present problems."""

    exports: tuple[Export, ...]
    allocator: str
    findings: tuple[Finding, ...]


def launch_environment(environ: Mapping[str, str], with_vllm: bool = False) -> LaunchEnvironment:
    """Choose the exports for this machine; variables already set stay as they are.

    `with_vllm`: vLLM will run inside the training process.
    """
    texts, machine = pick(environ), gather_machine(environ)
    machine = machine._replace(has_vllm=machine.has_vllm or with_vllm)
    chosen, why = choose(texts, machine)
    if chosen and not texts and find_spec("vllm") is not None:
        why += "; vLLM is installed: if it will run in the training process, give --vllm"
    exports = [Export(name, value, why) for name, value in chosen.items()]
    exports += [export for export in _others(environ) if export.name not in environ]
    findings = (*lint(texts, machine), *lock_findings(read_locks(environ)))
    return LaunchEnvironment(tuple(exports), why, findings)


def _others(environ: Mapping[str, str]) -> Iterator[Export]:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    there = map(str, Path("/dev").glob("nvidia[0-9]*"))
    cards = [name for name in (there if visible is None else visible.split(",")) if name]
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    num_cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    # TORCH_NCCL_ASYNC_ERROR_HANDLING is missing because its default is right.
    # Without a card it is unknown how many ranks share the CPUs; too many threads are slow.
    if cards:
        yield Export(
            "OMP_NUM_THREADS",
            str(max(1, num_cpus // len(cards))),
            "CPU threads per rank, one rank per card; torchrun would set 1, slow for ZeRO"
            " offload. No GPU memory",
        )
    yield Export(
        "TOKENIZERS_PARALLELISM",
        "false",
        "stops tokenizers from starting a thread pool that dataloader workers would fork, and"
        " its warning. No GPU memory",
    )
    yield Export(
        "HF_HUB_DISABLE_TELEMETRY",
        "1",
        "stops usage reports to the Hub from cluster nodes. No GPU memory",
    )
