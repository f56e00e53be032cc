"""Turn the options of `trainer-plugins plan` into what the planner takes."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from trainer_plugins.advice import SMALLER_ENGINE_SHARE, Door
from trainer_plugins.cli.plan_options import RunOptions
from trainer_plugins.planner.inputs import ConfigInputs, RunInputs
from trainer_plugins.planner.plan import PlanError

_LARGEST_LORA_RANK = 1 << 20
_LONGEST_NAME = 200
_QUANTISES = {each.name for each in fields(RunOptions) if each.name.startswith(("load_in", "bnb"))}
"""Options that are fields of a BitsAndBytesConfig, under their own names."""


def inputs_of(options: RunOptions, flags: Sequence[str]) -> tuple[ConfigInputs, RunInputs]:
    """Return the planner's inputs; `flags` are those of TrainingArguments."""
    quantisation = {
        name: value for name, value in asdict(options).items() if name in _QUANTISES and value
    }
    details = ConfigInputs(
        training_args=(*flags, *_vllm_flags(options.trainer, options.vllm_utilization)),
        num_labels=options.num_labels,
        images_per_row=options.images_per_row,
        image_size=options.image_size,
        sound_seconds=options.sound_seconds,
        trainer=options.trainer,
        seq_length=options.seq_length,
        target_length=options.target_length,
        dtype=options.dtype,
        attention=options.attn_implementation,
        head=options.head,
        peft_config=_adapter(options),
        accelerate_config=options.accelerate_config,
        num_evaluation_batches=options.eval_batches,
        has_metrics=options.metrics,
        quantization_config=quantisation or None,
        prepare_kbit=options.prepare_kbit,
        resident_layers=options.stream_base,
        streams_embeddings=options.stream_embeddings,
        from_hub=options.from_hub,
    )
    run = RunInputs(
        gpu=options.gpu,
        calibration=options.calibration,
        num_gpus=options.num_gpus,
        has_padding=options.padding,
        host_memory=options.host_memory,
        pinned_memory=options.pinned_memory,
    )
    return details, run


def _vllm_flags(trainer: str | None, share: float | None) -> tuple[str, ...]:
    if share is None:
        return ()
    if trainer not in ("grpo", "rloo", "gmpo"):
        raise PlanError("--vllm-utilization is for --trainer grpo, rloo or gmpo")
    if not 0 < share < 1:
        raise PlanError(f"--vllm-utilization is a share of the card below 1, got {share}")
    utilization = SMALLER_ENGINE_SHARE.flag(Door.TRL, share=share).split()
    return ("--use_vllm=True", "--vllm_mode=colocate", *utilization)


def _adapter(options: RunOptions) -> dict[str, object] | None:
    rank, target = options.lora_r, options.lora_target
    if options.peft_config is not None:
        if rank is not None:
            raise PlanError("--lora-r and --peft-config both say which adapter to train: give one")
        return _read_adapter(options.peft_config)
    if rank is None:
        return None
    if not 1 <= rank <= _LARGEST_LORA_RANK:
        raise PlanError(f"--lora-r is a rank from 1 to {_LARGEST_LORA_RANK:,}, got {rank:,}")
    modules = target if target == "all-linear" else [name.strip() for name in target.split(",")]
    return {"peft_type": "LORA", "r": rank, "target_modules": modules}


def _read_adapter(given: str) -> dict[str, object]:
    file = given if len(given) < _LONGEST_NAME else f"{given[:_LONGEST_NAME]}..."
    try:
        content = json.loads(given if given.lstrip().startswith("{") else Path(given).read_text())
    except OSError as error:
        raise PlanError(f"--peft-config: {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"--peft-config: {file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise PlanError(f"--peft-config: {file} holds no mapping")
    return content


def lengths_in(text: str | None) -> list[int]:
    """Return the lengths of rows in a text, each once."""
    if text is None:
        return []
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise PlanError(
            f"--search-lengths needs numbers of tokens with commas, as in 1024,2048, got {text!r}"
        )
    return sorted(dict.fromkeys(found))
