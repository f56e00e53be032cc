"""Read a DeepSpeed config, and refuse what cannot be planned. `launch/lint` checks its keys."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer_plugins.finding import Severity
from trainer_plugins.hf_trainer import HfArguments
from trainer_plugins.launch.lint.deepspeed import zero_findings
from trainer_plugins.launch.lint.document import ConfigError, Document, part, read_mapping
from trainer_plugins.launch.lint.schema import schema_findings
from trainer_plugins.planner.plan import NotPredicted, PlanError

# Keys that change no memory of a card (logs, counters, timers), or that the engine here obeys as in
# the real run.
_PLANNED = frozenset(
    {
        "zero_optimization",
        "bf16",
        "bfloat16",
        "fp16",
        "optimizer",
        "scheduler",
        "gradient_clipping",
        "data_types",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "steps_per_print",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "communication_data_type",
        "checkpoint",
        "gradient_predivide_factor",
        "prescale_gradients",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "tensorboard",
        "wandb",
        "csv_monitor",
        "comet",
        "log_level",
        "timers",
        "dataloader_drop_last",
        "aio",
        "disable_python_gc",
        "activation_checkpointing",  # does nothing to a model of transformers
    }
)
_BATCHES = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
_ZERO_PLUS_PLUS = (
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
)


def read_config(given: Any) -> dict[str, Any]:
    """Read a DeepSpeed config as TrainingArguments do: a mapping, a file's path, or JSON text."""
    if isinstance(given, dict):
        return given
    if isinstance(given, str) and given.startswith("{"):
        try:
            return dict(json.loads(given))
        except json.JSONDecodeError as error:
            raise PlanError(f"--deepspeed: {given} is not JSON: {error}") from error
    try:
        return dict(read_mapping(Path(given))[0])
    except ConfigError as error:
        raise PlanError(f"--deepspeed: {error}") from error


def refuse_config(config: dict[str, Any]) -> None:
    """Check a DeepSpeed config as the user wrote it."""
    # accelerate sets steps_per_print to infinity
    written = {key: value for key, value in config.items() if value != math.inf}
    document = Document(name="deepspeed", deepspeed=written)
    for finding in schema_findings(document):
        if finding.severity >= Severity.ERROR or finding.code == "config-unknown-key":
            raise PlanError(f"the DeepSpeed config: {finding.summary}. {finding.remedy}")
    for what in _unplanned(config):
        raise NotPredicted(what)
    for finding in zero_findings(document):
        if finding.severity >= Severity.ERROR:
            raise PlanError(f"the DeepSpeed config: {finding.summary}. {finding.remedy}")


def refuse_batches(config: Mapping[str, object], args: HfArguments) -> None:
    """Check the batch sizes of a config, which DeepSpeed checks only while it builds a model."""
    said = {key: config[key] for key in ("train_batch_size", *_BATCHES) if key in config}
    if not said:
        raise PlanError(
            'the DeepSpeed config has no batch size: set train_micro_batch_size_per_gpu to "auto"'
        )
    for key, name in _BATCHES.items():
        if said.get(key, "auto") not in ("auto", getattr(args, name)):
            asked = f"{name} {getattr(args, name)}"
            raise PlanError(
                f"the DeepSpeed config has {key} {said[key]}, the arguments {asked}: "
                'set it to "auto"'
            )


def _unplanned(config: dict[str, Any]) -> Iterator[str]:
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    if zero.get("stage", 0) not in (1, 2, 3):
        yield f"DeepSpeed without ZeRO (stage {zero.get('stage', 0)})"
    for name in ("offload_optimizer", "offload_param"):
        if part(zero, f"{name}.device") == "nvme":
            yield f"{name} to NVMe"
    if part(zero, "offload_optimizer.super_offload"):
        yield "SuperOffload (offload_optimizer.super_offload)"
    if part(zero, "offload_optimizer.ratio") not in (None, 1, "auto"):
        yield "an optimizer offloaded in part (offload_optimizer.ratio)"
    if zero.get("zero_hpz_partition_size", 1) > 1:
        yield "ZeRO++ (zero_hpz_partition_size)"
    yield from (f"ZeRO++ ({key})" for key in _ZERO_PLUS_PLUS if zero.get(key))
    if zero.get("zenflow"):
        yield "ZenFlow (zero_optimization.zenflow)"
    if zero.get("leaf_module"):
        yield "leaf modules (zero_optimization.leaf_module)"
    if part(config, "checkpoint.writer"):
        yield "DeepSpeed's own writer of checkpoints (checkpoint.writer)"
    for key, value in config.items():
        enabled = value.get("enabled", True) if isinstance(value, dict) else value
        if key not in _PLANNED and value and enabled:
            yield f"DeepSpeed's {key}"
    kind = part(config, "optimizer.type")
    if kind is not None and str(kind).lower() not in ("adam", "adamw"):
        yield f"DeepSpeed's optimizer {kind}"
