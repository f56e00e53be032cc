"""Read a launch file as `accelerate launch` does. Imports accelerate: only for the subprocess."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer_plugins.finding import Finding, Severity
from trainer_plugins.launch.launcher import EXPORTED
from trainer_plugins.launch.lint.document import ConfigError, Document, read_document
from trainer_plugins.launch.lint.schema import schema_findings
from trainer_plugins.patched import Patches
from trainer_plugins.planner.plan import NotPredicted, PlanError
from trainer_plugins.planner.request import PlanRequest, nodes_of

_PLANNED = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED")


def complete_launch(request: PlanRequest) -> PlanRequest:
    """Fill in a request from its launch file: cards, nodes, and all that accelerate exports."""
    if request.launch_file is None:
        num_gpus = max(1, request.num_gpus)
        num_nodes = request.num_nodes or nodes_of(num_gpus)
        return replace(request, num_gpus=num_gpus, num_nodes=num_nodes)
    name = Path(request.launch_file).name
    document = _document(request.launch_file)
    config = document.accelerate or {}
    _refuse(config, name)
    kind = config["distributed_type"]
    num_gpus = request.num_gpus or _num_processes(document, name)
    num_nodes = _num_nodes(config, num_gpus, name)
    if kind == "NO" and num_gpus > 1:
        raise PlanError(
            f"{name} launches one process (distributed_type NO), and --num-gpus is {num_gpus}"
        )
    if num_gpus % num_nodes:
        raise PlanError(
            f"{num_gpus} GPUs cannot be split evenly over the {num_nodes} machines of {name}"
        )
    try:
        environment = _environment(request.launch_file, num_gpus)
    except (ValueError, TypeError, KeyError) as error:
        why = " ".join(str(error).split())
        raise PlanError(f"{name}: accelerate refuses it: {why}") from error
    return replace(request, num_gpus=num_gpus, num_nodes=num_nodes, environment=environment)


def refuse_malformed(document: Document, findings: Iterable[Finding], where: str) -> None:
    """Refuse a file that stops its launch, or launches something else, or offloads to NVMe."""
    for part in ("optimizer", "param"):
        if document.deepspeed and document.get_offload(part, "device") == "nvme":
            raise NotPredicted(f"offload_{part} to NVMe: plan it with device cpu")
    for finding in findings:
        if finding.severity >= Severity.ERROR or finding.code == "config-unknown-key":
            raise PlanError(f"{where}: {finding.summary}. {finding.remedy}")


def _num_nodes(config: dict[str, Any], num_gpus: int, name: str) -> int:
    """Return the number of nodes, keeping the file's number of cards in each."""
    machines, processes = config.get("num_machines", 1), config.get("num_processes")
    if not isinstance(machines, int) or machines < 1:
        raise PlanError(f"num_machines of {name} must be at least 1, got {machines}")
    if not isinstance(processes, int) or processes < 1 or processes % machines:
        return nodes_of(num_gpus) if machines == 1 else machines
    return machines if num_gpus == processes else nodes_of(num_gpus, processes // machines)


def _document(path: str) -> Document:
    try:
        document = read_document(Path(path))
    except ConfigError as error:
        raise PlanError(f"--accelerate-config: {error}") from error
    refuse_malformed(document, schema_findings(document), "--accelerate-config")
    if document.accelerate is None or "distributed_type" not in document.accelerate:
        raise PlanError(
            f"--accelerate-config: {path} is no config of accelerate (it lacks distributed_type)"
        )
    if document.json_problem is not None:
        raise PlanError(f"--accelerate-config: deepspeed_config_file: {document.json_problem}")
    return document


def _refuse(config: dict[str, Any], name: str) -> None:
    kind = config["distributed_type"]
    if config.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise NotPredicted(f"what {name} launches: {config['compute_environment']}")
    if kind not in _PLANNED:
        raise NotPredicted(f"what {name} launches: distributed_type {kind}")
    if config.get("use_cpu"):
        raise NotPredicted(f"what {name} launches: training on the CPU (use_cpu)")


def _num_processes(document: Document, name: str) -> int:
    number = document.count("num_processes")
    if number is None and document.get_accelerate("distributed_type") != "NO":
        said = document.get_accelerate("num_processes")
        raise PlanError(
            f"{name} runs a process on each card (num_processes: {said}): give their number"
            " with --num-gpus"
        )
    return number or 1


def _environment(path: str, num_gpus: int) -> dict[str, str]:
    """Return the variables that accelerate would export to its processes, using its own code."""
    from accelerate.commands import launch
    from accelerate.utils import launch as prepare

    asked = ["--config_file", path, "--num_processes", str(num_gpus), "--main_process_port", "0"]
    started: list[Any] = []
    with Patches() as patches:
        for launcher in ("simple_launcher", "multi_gpu_launcher", "deepspeed_launcher"):
            patches.set(launch, launcher, started.append)
        launch.launch_command(launch.launch_command_parser().parse_args([*asked, "train.py"]))
    (args,) = started
    args.num_machines = 1  # With several machines, accelerate would look for the others.
    if args.use_deepspeed:
        _, exported = prepare.prepare_deepspeed_cmd_env(args)
    elif args.use_fsdp or args.multi_gpu:
        exported = prepare.prepare_multi_gpu_env(args)
    else:
        _, exported = prepare.prepare_simple_launcher_cmd_env(args)
    return {key: value for key, value in exported.items() if key.startswith(EXPORTED)}
