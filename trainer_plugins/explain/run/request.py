"""request_of: what a run wrote down about itself becomes a request for a plan. Imports no torch."""

import json
from collections.abc import Mapping
from dataclasses import replace

from trainer_plugins.explain.deciding import DECIDING
from trainer_plugins.explain.run.case import Case
from trainer_plugins.planner.cards import Card
from trainer_plugins.planner.plan import PlanError
from trainer_plugins.planner.request import ConfigSource, PlanRequest
from trainer_plugins.record.run_facts import RunFacts

_DEVICES = ("cuda", "simgpu")
_LAUNCHED = {"DeepSpeed": "deepspeed", "FSDP": "fsdp"}
"""What is set up by the argument of this name, or else by a launch file."""

_OF_THE_LAUNCH = {
    "DeepSpeed": ("ACCELERATE_USE_DEEPSPEED", ("ACCELERATE_",)),
    "FSDP": ("ACCELERATE_USE_FSDP", ("FSDP_", "ACCELERATE_USE_FSDP")),
}
"""The variable that says so if a launch file set it up, and how those begin that say how."""

_OF_THE_MACHINE = "ACCELERATE_TORCH_DEVICE"


def request_of(case: Case) -> PlanRequest:
    """Make the request for a plan of the run as it was, on the card as it was.

    Raises:
        PlanError: it cannot be planned from what is recorded; the message says what is missing.
    """
    record, run = case.record, case.record.run
    device = run.device.split(":")[0]
    if record.call != "train":
        raise PlanError(f"it failed in {record.call}(), and a plan is of train()")
    if device not in _DEVICES or not case.total:
        raise PlanError(f"it ran on {run.device or 'an unknown device'}")
    if case.tokens is None:
        raise PlanError("the batch is not known, or has no input_ids")
    _refuse(run)
    rows, length = case.tokens
    labels = record.batch.get("labels")
    is_quantised = "quantization_config" in run.model_config
    card = Card(
        name=run.card or device,
        capacity_bytes=case.total,
        context_bytes=case.outside,
        context_source="what was outside torch when it ran out of memory",
    )
    return PlanRequest(
        source=ConfigSource(
            config={**run.model_config, "architectures": [run.built_class.rpartition(".")[2]]},
            arguments=_flags(run.arguments),
            sequence_length=length,
            target_length=labels.shape[1] if labels and len(labels.shape) == 2 else None,
            dtype=None if is_quantised or not run.dtype else run.dtype,
            peft=run.adapter or None,
            num_evaluation_batches=max(1, run.num_evaluation_batches),
            has_metrics=run.has_metrics,
        ),
        device=device,
        card=card if run.capability is None else replace(card, capability=run.capability),
        allocator=_allocator(run),
        num_gpus=run.world_size,
        environment=_exported(run),
        has_padding=None if rows > 1 and "attention_mask" in record.batch else False,
    )


def _refuse(run: RunFacts) -> None:
    """Refuse runs of which a plan would be one of something else.

    Raises:
        PlanError: this is such a run.
    """
    if not run.built_class.startswith("transformers."):
        raise PlanError(
            f"transformers has no class {run.built_class or run.model or 'of its model'}"
        )
    if run.model.startswith("Peft") and not run.adapter:
        raise PlanError("its adapter is not recorded")
    family = run.strategy.family if run.strategy is not None else "unknown"
    if family in _LAUNCHED and not run.arguments.get(_LAUNCHED[family]) and not _exported(run):
        raise PlanError(f"its launch file is not recorded, from which it ran as {family}")
    if family not in (*_LAUNCHED, "DDP", "nothing"):
        raise PlanError(f"it ran as {family}")


def _exported(run: RunFacts) -> dict[str, str]:
    """Return what a launch file came to; nothing where the arguments say it, or no file did."""
    family = run.strategy.family if run.strategy is not None else ""
    if run.launch is None or family not in _LAUNCHED or run.arguments.get(_LAUNCHED[family]):
        return {}
    switch, wanted = _OF_THE_LAUNCH[family]
    told = run.launch.environment
    if str(told.get(switch)).lower() != "true":
        return {}
    found = {
        name: text
        for name, text in told.items()
        if name.startswith(wanted) and name != _OF_THE_MACHINE
    }
    if run.launch.deepspeed:
        found["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = json.dumps(run.launch.deepspeed)
    return found


def _flags(arguments: Mapping[str, object]) -> tuple[str, ...]:
    flags = ["--output_dir", "runs"]
    for name in DECIDING:
        value = arguments.get(name)
        if value in (None, "", [], {}):
            continue
        if isinstance(value, list):
            value = " ".join(map(str, value))
        flags += [f"--{name}", json.dumps(value) if isinstance(value, Mapping) else str(value)]
    return tuple(flags)


def _allocator(run: RunFacts) -> str:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return next((run.allocator[name] for name in names if name in run.allocator), "")
