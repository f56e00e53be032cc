"""Read a launch file as `accelerate launch` does. Imports accelerate: only for the subprocess."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from trainer_plugins.launch.lint.document import ConfigError, Document, read_document
from trainer_plugins.launch.lint.schema import schema_findings
from trainer_plugins.patched import Patches
from trainer_plugins.planner.plan import NotPredicted, PlanError
from trainer_plugins.planner.request import PlanRequest, nodes_of, with_nodes

# Findings about the form of a file that stop a launch, or launch something else than was written.
_MALFORMED = (
    "config-duplicate-key",
    "config-unknown-key",
    "config-wrong-type",
    "config-removed-key",
)
_REFUSED = {
    "MEGATRON_LM": "Megatron-LM",
    "XLA": "TPUs (distributed_type XLA)",
    "TPU": "TPUs (distributed_type TPU)",
    "MULTI_CPU": "training on CPUs (distributed_type MULTI_CPU)",
}
_PLANNED = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED")
_FREE_PORT = "0"


def as_launched(request: PlanRequest) -> PlanRequest:
    """Complete a request by its launch file: cards, nodes, and all that accelerate exports."""
    if request.launch_file is None:
        return with_nodes(request)
    name = Path(request.launch_file).name
    document = _document(request.launch_file)
    config = document.accelerate or {}
    _refuse(config, name)
    kind = config["distributed_type"]
    num_gpus = request.num_gpus or _num_processes(config, name)
    num_nodes = _num_nodes(config, num_gpus, name)
    if kind == "NO" and num_gpus > 1:
        raise PlanError(
            f"{name} launches one process (distributed_type NO), and --num-gpus says {num_gpus}"
        )
    if num_gpus % num_nodes:
        raise PlanError(
            f"{num_gpus} GPUs cannot be divided among the {num_nodes} machines of {name}"
        )
    with _told_of(request.launch_file):
        environment = _environment(request.launch_file, num_gpus)
    return replace(request, num_gpus=num_gpus, num_nodes=num_nodes, environment=environment)


def with_deepspeed(request: PlanRequest) -> PlanRequest:
    """Complete a request by the DeepSpeed config in what a launcher has exported, if it has one."""
    exported = dict(request.environment)
    if exported.get("ACCELERATE_USE_DEEPSPEED") != "true" or request.deepspeed is not None:
        return request
    with _told_of(request.launch_file):
        deepspeed = _deepspeed(exported)
    return replace(request, deepspeed=deepspeed, environment=_without_deepspeed(exported))


@contextmanager
def _told_of(path: str | None) -> Iterator[None]:
    """Say which file it is that accelerate refuses, if it is known."""
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        why = " ".join(str(error).split())
        known = f"{Path(path).name}: accelerate refuses it" if path is not None else None
        what = known or "accelerate refuses what it was launched with"
        raise PlanError(f"{what}: {why}") from error


def _without_deepspeed(environment: dict[str, str]) -> dict[str, str]:
    """Keep what accelerate reads in addition to the config of DeepSpeed."""
    wanted = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_PARALLELISM_", "PARALLELISM_CONFIG_")
    return {key: value for key, value in environment.items() if key.startswith(wanted)}


def _num_nodes(config: dict[str, Any], num_gpus: int, name: str) -> int:
    """Return the number of nodes, each with as many cards as the file says."""
    machines, processes = config.get("num_machines", 1), config.get("num_processes")
    if not isinstance(machines, int) or machines < 1:
        raise PlanError(f"{name} has num_machines {machines}: it is 1 or more")
    if not isinstance(processes, int) or processes < 1 or processes % machines:
        return nodes_of(num_gpus) if machines == 1 else machines
    return machines if num_gpus == processes else nodes_of(num_gpus, processes // machines)


def _document(path: str) -> Document:
    try:
        document = read_document(Path(path))
    except ConfigError as error:
        raise PlanError(f"--accelerate-config: {error}") from error
    for finding in schema_findings(document):
        if finding.code in _MALFORMED:
            what = f"{finding.summary}: {finding.evidence}. {finding.remedy}"
            raise PlanError(f"--accelerate-config: {what}")
    if document.accelerate is None or "distributed_type" not in document.accelerate:
        raise PlanError(
            f"--accelerate-config: {path} has no distributed_type: "
            "it is not a config file of accelerate"
        )
    if document.json_problem is not None:
        raise PlanError(f"--accelerate-config: deepspeed_config_file: {document.json_problem}")
    return document


def _refuse(config: dict[str, Any], name: str) -> None:
    kind = config["distributed_type"]
    if config.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise NotPredicted(f"what {name} launches: {config['compute_environment']}")
    if not isinstance(kind, str):
        raise PlanError(f"{name} has distributed_type {kind}: it is a name, as in FSDP")
    if kind not in _PLANNED:
        raise NotPredicted(
            f"what {name} launches: {_REFUSED.get(kind, f'distributed_type {kind}')}"
        )
    if config.get("use_cpu"):
        raise NotPredicted(f"what {name} launches: training on the CPU (use_cpu)")


def _num_processes(config: dict[str, Any], name: str) -> int:
    number = config.get("num_processes", 1 if config["distributed_type"] == "NO" else None)
    if isinstance(number, int) and number > 0:
        return number
    if config["distributed_type"] == "NO":
        return 1
    raise PlanError(
        f"{name} runs a process on each card (num_processes: {number}): "
        "say how many with --num-gpus"
    )


def _environment(path: str, num_gpus: int) -> dict[str, str]:
    """Return what accelerate exports to the processes that it starts, by its own code."""
    from accelerate.commands import launch
    from accelerate.utils import launch as prepare

    flags = {
        "--config_file": path,
        "--num_processes": str(num_gpus),
        "--main_process_port": _FREE_PORT,
    }
    asked = [text for flag in flags.items() for text in flag]
    started: list[Any] = []
    with Patches() as patches:
        for launcher in ("simple_launcher", "multi_gpu_launcher", "deepspeed_launcher"):
            patches.set(launch, launcher, started.append)
        launch.launch_command(launch.launch_command_parser().parse_args([*asked, "train.py"]))
    (args,) = started
    args.num_machines = 1  # with several, accelerate would look for the others
    if args.use_deepspeed:
        _, exported = prepare.prepare_deepspeed_cmd_env(args)
    elif args.use_fsdp or args.multi_gpu:
        exported = prepare.prepare_multi_gpu_env(args)
    else:
        _, exported = prepare.prepare_simple_launcher_cmd_env(args)
    return {
        key: value
        for key, value in exported.items()
        if key.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"))
    }


def _deepspeed(environment: dict[str, str]) -> dict[str, object]:
    """Return the config that accelerate gives to DeepSpeed, with each "auto" as it is."""
    from accelerate import DeepSpeedPlugin

    with patch.dict(os.environ, environment):
        config: dict[str, object] = DeepSpeedPlugin().deepspeed_config
    return config
