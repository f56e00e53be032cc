"""Ask once what kind of run is planned, and say it in words."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from trainer_plugins.checkpointing import is_asked, is_checkpointing
from trainer_plugins.hf_trainer import HfArguments, HfTrainer
from trainer_plugins.planner.request import ConfigSource, PlanRequest, TrainerSource
from trainer_plugins.wrapped import base_model

_NO_CARD = "none is named: kernels of an H100 (sm_90)"
_BITS = {"Linear4bit": 4, "Linear8bitLt": 8}  # of a weight, by bitsandbytes' names of its layers
_EXPORTED = "PARALLELISM_CONFIG_"


class Wrapper(Enum):
    """Says what divides the work among cards."""

    ONE_CARD = "one card"
    DDP = "DDP"
    FSDP1 = "FSDP1"
    FSDP2 = "FSDP2"
    DEEPSPEED = "DeepSpeed"
    TENSOR_PARALLEL = "tensor parallelism"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Describes what kind of run is planned."""

    wrapper: Wrapper
    deepspeed: object  # the DeepSpeed config as it was given; None without one
    sizes: Mapping[str, int]  # of accelerate's ParallelismConfig, as in `cp_size`
    optimizer: str  # the optimizer, as in `--optim adamw_torch`
    is_quantised: bool  # whether bitsandbytes may have quantised the base
    is_streamed: bool
    trains_on_completions: bool  # generates what it trains on, as TRL's GRPO and RLOO
    evaluates: bool
    saves: bool


def kind_of(request: PlanRequest, args: HfArguments) -> Kind:
    """Return what kind of run a request with these arguments describes."""
    source = request.source
    # the Trainer's arguments win over a launcher's
    deepspeed = args.deepspeed or request.deepspeed
    sizes = sizes_of(request, args)
    return Kind(
        wrapper=_wrapper(request, args, deepspeed, sizes),
        deepspeed=deepspeed,
        sizes=sizes,
        optimizer=text_of(args.optim),
        is_quantised=is_quantised(source),
        is_streamed=request.resident_layers is not None,
        trains_on_completions=hasattr(args, "steps_per_generation"),
        evaluates=text_of(args.eval_strategy).lower() != "no" or args.do_eval,
        saves=text_of(args.save_strategy).lower() != "no",
    )


def is_quantised(source: ConfigSource | TrainerSource) -> bool:
    """Return whether bitsandbytes may have quantised the base of a run."""
    if isinstance(source, TrainerSource):  # the pickle names the classes of its layers
        names = (b"bitsandbytes", b"Linear4bit", b"Linear8bitLt")
        return any(name in source.trainer for name in names)
    given: Any = source.quantisation or source.config.get("quantization_config") or {}
    return bool(given) and given.get("quant_method") != "mxfp4"  # that is decoded while loading


def _wrapper(
    request: PlanRequest, args: HfArguments, deepspeed: object, sizes: Mapping[str, int]
) -> Wrapper:
    if deepspeed is not None:
        return Wrapper.DEEPSPEED
    version = _fsdp_version(request, args)
    if version is not None:
        return Wrapper.FSDP1 if version == 1 else Wrapper.FSDP2
    if sizes.get("tp_size", 1) > 1:
        return Wrapper.TENSOR_PARALLEL
    return Wrapper.DDP if request.num_gpus > 1 else Wrapper.ONE_CARD


def _fsdp_version(request: PlanRequest, args: HfArguments) -> int | None:
    """Return the version of FSDP that the launch and the arguments ask for; None is no FSDP.

    The arguments win, and transformers 5 says in them what it makes of them. transformers 4 writes
    to the environment.
    """
    if not args.fsdp and request.environment.get("ACCELERATE_USE_FSDP") != "true":
        return None
    given = getattr(args, "fsdp_plugin_args", None) or {}
    return int(given.get("fsdp_version") or os.environ.get("FSDP_VERSION", "1"))


def cards_of_a_row(sizes: Mapping[str, int]) -> int:
    """Return how many cards work on the same rows."""
    return sizes.get("cp_size", 1) * sizes.get("sp_size", 1) * sizes.get("tp_size", 1)


def sizes_of(request: PlanRequest, args: Any) -> Mapping[str, int]:
    """Return the sizes in accelerate's ParallelismConfig: of the arguments, else of a launcher."""
    if (config := getattr(args, "parallelism_config", None)) is not None:
        return {name: size for name, size in vars(config).items() if name.endswith("size")}
    exported = request.environment
    if exported.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() != "true":
        return {}
    return {
        name.removeprefix(_EXPORTED).lower(): int(size)
        for name, size in exported.items()
        if name.startswith(_EXPORTED) and name.endswith("SIZE")
    }


def text_of(setting: object) -> str:
    """Return the text of a setting that is a string or an enum of strings."""
    return str(getattr(setting, "value", setting))


def planned_of(
    request: PlanRequest, trainer: HfTrainer, args: HfArguments, kind: Kind
) -> dict[str, str]:
    """Return the model, the batch, the optimizer and the launch of a run, by name."""
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    base = base_model(model)
    name = getattr(getattr(base, "config", None), "_name_or_path", "")
    rows, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    shares = cards_of_a_row(kind.sizes)
    batch = rows * steps * request.num_gpus // shares
    shared = f" ({shares} share a row)" if shares > 1 else ""
    planned = {
        "model": f"{type(base).__name__}{f' ({name})' if name else ''}",
        "rows": f"{rows} at once x {steps} x {request.num_gpus} GPU{shared}, {batch} a step",
    }
    source = request.source
    if isinstance(source, ConfigSource):
        if source.trainer is not None:
            planned["trainer"] = f"TRL's {type(trainer).__name__}"
        if getattr(base, "main_input_name", "input_ids") == "input_ids":
            planned |= _length(source, args)
            if source.target_length is not None:
                planned["length"] += f", labels {source.target_length}"
    if kind.is_quantised:
        kinds = {type(part).__name__ for part in base.modules()}
        if bits := next((_BITS[name] for name in _BITS if name in kinds), 0):
            planned["quantised"] = f"{bits} bits, by bitsandbytes"
    # PEFT switches checkpointing on too, for a quantised base (`prepare_model_for_kbit_training`)
    is_on = "on" if is_asked(args) else "on, by prepare_model_for_kbit_training"
    checkpoints = is_asked(args) or is_checkpointing(base)
    planned |= {
        "dtype": _dtype(base, args, source),
        "optimizer": kind.optimizer,
        "adapter": _adapter(model),
        "checkpointing": is_on if checkpoints else "off",
        "strategy": _strategy(request, kind),
    }
    if guess := _NO_CARD if request.card is None else request.card.guess:
        planned["card"] = guess
    if request.launch_file is not None:
        planned["launch file"] = Path(request.launch_file).name
    if request.allocator:
        planned["allocator"] = request.allocator
    if request.command is not None:
        planned["command"] = request.command
    return planned


def _length(source: ConfigSource, args: Any) -> dict[str, str]:
    """Say how long rows are: TRL cuts them, and fills those that it packs."""
    length, most = source.sequence_length, getattr(args, "max_length", None)
    if (
        source.trainer is None
        or not most
        or (length <= most and not getattr(args, "packing", False))
    ):
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


def _mapping(deepspeed: object) -> Mapping[str, Any]:
    """Return a DeepSpeed config that was given as a mapping, as JSON or as the path of a file."""
    if isinstance(deepspeed, str):
        text = deepspeed if deepspeed.startswith("{") else Path(deepspeed).read_text()
        deepspeed = json.loads(text)
    return deepspeed if isinstance(deepspeed, Mapping) else {}


def _strategy(request: PlanRequest, kind: Kind) -> str:
    if kind.wrapper is Wrapper.DEEPSPEED:
        zero = _mapping(kind.deepspeed).get("zero_optimization")
        stage = zero.get("stage") if isinstance(zero, dict) else None
        return f"DeepSpeed ZeRO-{stage}" if stage is not None else "DeepSpeed"
    source = request.source
    if isinstance(source, TrainerSource) and (cards := {*source.device_map.values()} - {0}):
        return f"one process, {len(cards | {0})} cards (device_map)"
    return str(kind.wrapper.value)
