"""Say what was planned, so that a plan can be read, and made again, without its command."""

from pathlib import Path

from trainer_plugins.planner.pretend import quantised
from trainer_plugins.planner.request import ConfigSource, PlanRequest, TrainerSource
from trainer_plugins.planner.sharded.strategies import cards_of_a_row, fsdp_version, sizes_of
from trainer_plugins.planner.trainer import Arguments, TrainerLike, optimizer_name
from trainer_plugins.wrapped import base_model


def planned_of(request: PlanRequest, trainer: TrainerLike, args: Arguments) -> dict[str, str]:
    """Return the model, the batch, the optimizer and the launch of a run, by name."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    base = base_model(model)
    name = getattr(getattr(base, "config", None), "_name_or_path", "")
    rows, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    shares = cards_of_a_row(request, args)
    batch = rows * steps * request.num_gpus // shares
    shared = f" ({shares} share a row)" if shares > 1 else ""
    source = request.source
    planned = {
        "model": f"{type(base).__name__}{f' ({name})' if name else ''}",
        "rows": f"{rows} at once x {steps} x {request.num_gpus} GPU{shared}, {batch} a step",
    }
    if isinstance(source, ConfigSource):
        if source.trainer is not None:
            planned["trainer"] = f"TRL's {type(trainer).__name__}"
        if getattr(base, "main_input_name", "input_ids") == "input_ids":
            planned["length"] = f"{source.sequence_length} tokens"
            if source.target_length is not None:
                planned["length"] += f", labels {source.target_length}"
    if bits := quantised.bits_of(base):
        planned["quantised"] = f"{bits} bits, by bitsandbytes"
    planned |= {
        "dtype": f"{_dtype(base)}{_autocast(args)}",
        "optimizer": optimizer_name(args),
        "adapter": _adapter(model),
        "checkpointing": "on" if _is_checkpointing(base, args) else "off",
        "strategy": _strategy(request, args),
    }
    if request.launch_file is not None:
        planned["launch file"] = Path(request.launch_file).name
    if request.allocator:
        planned["allocator"] = request.allocator
    if request.command is not None:
        planned["command"] = request.command
    return planned


def _is_checkpointing(model: object, args: Arguments) -> bool:
    """Also PEFT switches it on, for a quantised base (`prepare_model_for_kbit_training`)."""
    return bool(args.gradient_checkpointing or getattr(model, "is_gradient_checkpointing", False))


def _dtype(model: object) -> str:
    return str(getattr(model, "dtype", "")).removeprefix("torch.")


def _autocast(args: Arguments) -> str:
    used = next((name for name in ("bf16", "fp16") if getattr(args, name, False)), None)
    return f", autocast to {used}" if used else ""


def _adapter(model: object) -> str:
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict) or not configs:
        return "none"
    config = next(iter(configs.values()))
    kind = getattr(config.peft_type, "value", config.peft_type)
    rank = getattr(config, "r", None)
    return f"{kind}{f', r={rank}' if rank is not None else ''}"


def _strategy(request: PlanRequest, args: Arguments) -> str:
    if getattr(args, "deepspeed", None) or request.deepspeed is not None:
        config = request.deepspeed or {}
        zero = config.get("zero_optimization")
        stage = zero.get("stage") if isinstance(zero, dict) else None
        return f"DeepSpeed ZeRO-{stage}" if stage is not None else "DeepSpeed"
    if (version := fsdp_version(request, args)) is not None:
        return f"FSDP{version}"
    source = request.source
    if isinstance(source, TrainerSource) and (cards := {*source.device_map.values()} - {0}):
        return f"one process, {len(cards | {0})} cards (device_map)"
    if sizes_of(request.environment, args).get("tp_size", 1) > 1:
        return "tensor parallelism"
    return "DDP" if request.num_gpus > 1 else "one card"
