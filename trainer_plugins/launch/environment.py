"""Chooses the variables to export before a launch on this machine, with a reason for each."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from trainer_plugins.allocator.lint import choose, lint
from trainer_plugins.allocator.machine import Machine, gather_machine
from trainer_plugins.allocator.variables import Variables
from trainer_plugins.finding import Finding
from trainer_plugins.launch.extensions import ExtensionLock, lock_findings, read_locks

ASKS_FOR_VLLM = "vLLM is installed: if it will run in the training process, give --vllm"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFacts:
    """Describes this machine before a launch."""

    machine: Machine = field(default_factory=Machine)
    num_cpus: int = 1  # the number of CPUs that this process may use
    num_cards: int = 0
    vllm_is_installed: bool = False
    extension_locks: tuple[ExtensionLock, ...] = ()


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


def gather(environ: Mapping[str, str], with_vllm: bool = False) -> LaunchFacts:
    """Look at this machine; `with_vllm`: vLLM will run inside the training process."""
    machine = gather_machine(environ)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    there = map(str, Path("/dev").glob("nvidia[0-9]*"))
    cards = [name for name in (there if visible is None else visible.split(",")) if name]
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return LaunchFacts(
        machine=replace(machine, has_vllm=machine.has_vllm or with_vllm),
        num_cpus=len(affinity(0)) if affinity else os.cpu_count() or 1,
        num_cards=len(cards),
        vllm_is_installed=find_spec("vllm") is not None,
        extension_locks=read_locks(environ),
    )


def launch_environment(environ: Mapping[str, str], facts: LaunchFacts) -> LaunchEnvironment:
    """Choose the exports; variables that are set stay as they are."""
    variables = Variables.of(environ)
    choice = choose(variables, facts.machine)
    why = choice.why
    if choice.exports and not variables.texts and facts.vllm_is_installed:
        why += f"; {ASKS_FOR_VLLM}"
    exports = [Export(name, value, why) for name, value in choice.exports.items()]
    exports += [export for export in _others(facts) if export.name not in environ]
    findings = (*lint(variables, facts.machine), *lock_findings(facts.extension_locks))
    return LaunchEnvironment(tuple(exports), why, findings)


def _others(facts: LaunchFacts) -> Iterator[Export]:
    # TORCH_NCCL_ASYNC_ERROR_HANDLING is missing because its default is right.
    # Without a card it is unknown how many ranks share the CPUs; too many threads are slow.
    if facts.num_cards:
        yield Export(
            "OMP_NUM_THREADS",
            str(max(1, facts.num_cpus // facts.num_cards)),
            "CPU threads of each rank, one rank a card; torchrun would set 1, slow for ZeRO"
            " offload. No GPU memory",
        )
    yield Export(
        "TOKENIZERS_PARALLELISM",
        "false",
        "no thread pool in tokenizers that dataloader workers would fork, and no warning about it."
        " No GPU memory",
    )
    yield Export(
        "HF_HUB_DISABLE_TELEMETRY",
        "1",
        "no usage reports to the Hub from cluster nodes. No GPU memory",
    )
