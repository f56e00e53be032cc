"""request_of: what a run wrote about itself becomes a request for a plan. Imports no torch."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from trainer_plugins.explain.run.case import Case
from trainer_plugins.explain.text.remedies.plan_command import DECIDING
from trainer_plugins.planner.cards import Card
from trainer_plugins.planner.plan import PlanError
from trainer_plugins.planner.request import ConfigSource, PlanRequest
from trainer_plugins.record.run_facts import RunFacts

_DEVICES = ("cuda", "simgpu")


class _SetUp(NamedTuple):
    """Names what sets a strategy up: an argument, or else variables of a launch file."""

    argument: str
    switch: str  # the variable that switches it on
    prefixes: tuple[str, ...]  # of the variables that hold its settings


_SET_UP = {
    "DeepSpeed": _SetUp("deepspeed", "ACCELERATE_USE_DEEPSPEED", ("ACCELERATE_",)),
    "FSDP": _SetUp("fsdp", "ACCELERATE_USE_FSDP", ("FSDP_", "ACCELERATE_USE_FSDP")),
}
_OF_THIS_MACHINE = "ACCELERATE_TORCH_DEVICE"


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
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
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
        allocator=next((run.allocator[name] for name in names if name in run.allocator), ""),
        num_gpus=run.world_size,
        environment=_exported(run),
        has_padding=None if rows > 1 and "attention_mask" in record.batch else False,
    )


def _refuse(run: RunFacts) -> None:
    """Refuse runs whose plan would be a plan of something else.

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
    set_up = _SET_UP.get(family)
    if set_up and not run.arguments.get(set_up.argument) and not _exported(run):
        raise PlanError(f"its launch file is not recorded, from which it ran as {family}")
    if set_up is None and family not in ("DDP", "nothing"):
        raise PlanError(f"it ran as {family}")


def _exported(run: RunFacts) -> dict[str, str]:
    """Return the variables that a launch file set; none if arguments set the strategy up."""
    set_up = _SET_UP.get(run.strategy.family) if run.strategy is not None else None
    if run.launch is None or set_up is None or run.arguments.get(set_up.argument):
        return {}
    variables = run.launch.environment
    if str(variables.get(set_up.switch)).lower() != "true":
        return {}
    found = {
        name: text
        for name, text in variables.items()
        if name.startswith(set_up.prefixes) and name != _OF_THIS_MACHINE
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
