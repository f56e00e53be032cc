"""Describe the planned run in words: the model, the batch, the optimizer, the launch."""

from pathlib import Path
from typing import Any

from trainer_plugins.checkpointing import is_asked, is_checkpointing
from trainer_plugins.hf_trainer import HfArguments
from trainer_plugins.planner.rehearse.rehearsal import count_sharers
from trainer_plugins.planner.request import ConfigSource, PlanRequest, TrainerSource
from trainer_plugins.units import count_in_words
from trainer_plugins.wrapped import base_model

_NO_CARD = "none is named: kernels of an H100 (sm_90)"
_BITS = {"Linear4bit": 4, "Linear8bitLt": 8}  # bits of a weight, by class of a bitsandbytes layer


def describe_run(request: PlanRequest, trainer: Any, args: HfArguments) -> dict[str, str]:
    """Return the model, the batch, the optimizer and the launch of a run, by name."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    base: Any = base_model(model)
    name = getattr(getattr(base, "config", None), "_name_or_path", "")
    rows, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    shares = count_sharers(trainer, "cp", "sp", "tp")
    batch = rows * steps * request.num_gpus // shares
    shared = f" ({shares} share a row)" if shares > 1 else ""
    planned = {
        "model": f"{type(base).__name__}{f' ({name})' if name else ''}",
        "batch": f"{count_in_words(rows, 'row')} x {count_in_words(steps, 'accumulation step')} x"
        f" {count_in_words(request.num_gpus, 'GPU')}{shared} ="
        f" {count_in_words(batch, 'row')} per step",
    }
    source = request.source
    if isinstance(source, ConfigSource):
        if source.trainer is not None:
            planned["trainer"] = f"TRL's {type(trainer).__name__}"
        if getattr(base, "main_input_name", "input_ids") == "input_ids":
            planned |= _length(source, args)
            if source.target_length is not None:
                planned["length"] += f", labels {source.target_length}"
    kinds = {type(part).__name__ for part in base.modules()}
    if bits := next((_BITS[name] for name in _BITS if name in kinds), 0):
        planned["quantised"] = f"{bits} bits, by bitsandbytes"
    # PEFT also switches checkpointing on for a quantised base (`prepare_model_for_kbit_training`).
    is_on = "on" if is_asked(args) else "on, by prepare_model_for_kbit_training"
    checkpoints = is_asked(args) or is_checkpointing(base)
    planned |= {
        "dtype": _dtype(base, args, source),
        "optimizer": str(getattr(args.optim, "value", args.optim)),
        "adapter": _adapter(model),
        "checkpointing": is_on if checkpoints else "off",
        "strategy": _strategy(request, trainer),
    }
    if guess := _NO_CARD if request.card is None else request.card.guess:
        planned["card"] = guess
    if request.launch_file is not None:
        planned["launch file"] = Path(request.launch_file).name
    if request.allocator:
        planned["allocator"] = request.allocator
    return planned


def _length(source: ConfigSource, args: Any) -> dict[str, str]:
    """Describe the length of rows: TRL cuts them, and fills packed ones."""
    length, most = source.sequence_length, getattr(args, "max_length", None)
    is_packed = getattr(args, "packing", False)
    if source.trainer is None or not most or (length <= most and not is_packed):
        return {"length": f"{length} tokens"}
    said = {"length": f"{most} tokens"}
    if source.has_length and most < length:
        said["cut"] = f"rows of {length} tokens are cut at {most} (max_length)"
    return said


def _dtype(model: object, args: HfArguments, source: ConfigSource | TrainerSource) -> str:
    dtype = str(getattr(model, "dtype", "")).removeprefix("torch.")
    if isinstance(source, ConfigSource) and source.trainer is not None and source.dtype is None:
        dtype += " (TRL's default: see --dtype)"
    used = next((name for name in ("bf16", "fp16") if getattr(args, name, False)), None)
    return f"{dtype}, autocast to {used}" if used else dtype


def _adapter(model: object) -> str:
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict) or not configs:
        return "none"
    config = next(iter(configs.values()))
    kind = getattr(config.peft_type, "value", config.peft_type)
    rank = getattr(config, "r", None)
    return f"{kind}{f', r={rank}' if rank is not None else ''}"


def _strategy(request: PlanRequest, trainer: Any) -> str:
    accelerator = trainer.accelerator
    if trainer.is_deepspeed_enabled:
        plugin = accelerator.state.deepspeed_plugin
        stage = plugin.deepspeed_config.get("zero_optimization", {}).get("stage")
        return f"DeepSpeed ZeRO-{stage}" if stage is not None else "DeepSpeed"
    if trainer.is_fsdp_enabled:
        return f"FSDP{accelerator.state.fsdp_plugin.fsdp_version}"
    if count_sharers(trainer, "tp") > 1:
        return "tensor parallelism"
    source = request.source
    if isinstance(source, TrainerSource) and (cards := {*source.device_map.values()} - {0}):
        return f"one process, {len(cards | {0})} cards (device_map)"
    return "DDP" if request.num_gpus > 1 else "one card"
