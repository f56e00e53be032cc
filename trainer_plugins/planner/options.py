"""Define the options of `plan` and `check`, with which users describe a run.

To add an option, write a field here (or in `AnswerOptions` of `trainer_plugins/cli/plan.py`, if it
changes the output only), and use it in `trainer_plugins/planner/inputs.py`. `docs/plan.md` explains
it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from trainer_plugins.advice import SMALLER_ENGINE_SHARE, Door
from trainer_plugins.planner.plan import PlanError

MOST_USED = "Most used"  # the first panel of a long help
PINNED_MEMORY_HELP = "How much of it can be pinned, as in 2GiB (WSL has a limit)."

_MODEL = "Model"
_DATA = "Data and evaluation"
_ADAPTER = "Adapters and a frozen base"
_QUANTISATION = "Quantisation"
_MACHINE = "Machine"


def option(panel: str, help: str, *, default: object = None, metavar: str | None = None) -> Any:
    """Declare a dataclass field as an option of a command, in a panel of its help."""
    return field(default=default, metadata={"help": help, "metavar": metavar, "panel": panel})


switch, repeatable = partial(option, default=False), partial(option, default=())


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Describes one run: model, data, adapter, quantisation, machine and launch.

    A field of type Any is text on a command line; `plan_run` also takes an object there.
    """

    model: str | None = option(
        MOST_USED,
        "A config.json, its folder, org/name in the local hub cache, or a known model's name.",
    )
    from_hub: bool = switch(_MODEL, "Download the config.json of --model org/name.")
    dtype: str | None = option(
        _MODEL, "Load weights as bfloat16, float16 or float32 (default: as from_pretrained)."
    )
    attn_implementation: str | None = option(
        _MODEL, "Attention: eager, sdpa or flash_attention_2 (default: from the config)."
    )
    head: str | None = option(
        _MODEL, "The head to train, as in TokenClassification (default: from the config)."
    )
    trainer: str | None = option(
        _MODEL,
        "TRL trainer: sft, dpo, kto, reward, grpo, rloo, gmpo, orpo, cpo or tpo; takes all"
        " flags of its config (default: transformers.Trainer).",
        metavar="NAME",
    )
    num_labels: int | None = option(_MODEL, "Number of labels (default: from the config).")

    seq_length: int | None = option(
        MOST_USED, "Tokens per row (default: 2048; 1024 where TRL cuts rows there)."
    )
    target_length: int | None = option(
        _DATA, "Tokens per label of an encoder-decoder (default: --seq-length)."
    )
    images_per_row: int | None = option(
        _DATA, "Images per row of a vision-language model (default: 1)."
    )
    image_size: str | None = option(
        _DATA, "Image size in pixels (default: from the config; printed).", metavar="HxW"
    )
    sound_seconds: float | None = option(
        _DATA, "Seconds of audio per row, at 16,000 samples per second.", metavar="S"
    )
    padding: bool | None = option(
        _DATA, "Whether batches have padding (default: if a batch has several rows)."
    )
    eval_batches: int = option(_DATA, "Number of batches per evaluation.", default=8)
    metrics: bool = switch(
        _DATA, "The Trainer has compute_metrics, so an evaluation keeps all outputs."
    )

    lora_r: int | None = option(MOST_USED, "LoRA rank (default: train all weights).")
    lora_target: str = option(
        _ADAPTER,
        "Modules that get an adapter: all-linear, or names separated by commas.",
        default="all-linear",
    )
    peft_config: Any = option(
        _ADAPTER, "A PEFT adapter_config.json, or its JSON, instead of --lora-r."
    )
    prepare_kbit: bool | None = option(
        _ADAPTER, "Prepare a quantised base for k-bit training (default: yes)."
    )
    stream_base: int | None = option(
        _ADAPTER, "Stream the frozen base from main memory, with K layers on the card.", metavar="K"
    )
    stream_embeddings: bool = switch(
        _ADAPTER, "With --stream-base: also stream embeddings and head."
    )

    load_in_4bit: bool = switch(MOST_USED, "Quantise the base to 4 bits (QLoRA).")
    load_in_8bit: bool = switch(_QUANTISATION, "Quantise the base to int8.")
    bnb_4bit_quant_type: str | None = option(
        _QUANTISATION, "Data type of 4-bit weights: nf4 or fp4 (default: fp4)."
    )
    bnb_4bit_use_double_quant: bool = switch(_QUANTISATION, "Quantise the scales too.")
    bnb_4bit_compute_dtype: str | None = option(
        _QUANTISATION, "Dtype of matrix products (default: float32)."
    )
    bnb_4bit_quant_storage: str | None = option(
        _QUANTISATION, "Dtype that packs 4-bit weights (default: uint8)."
    )

    gpu: str | None = option(
        MOST_USED,
        "The GPU: a name (t4, rtx4090, a100-80gb, h100-80gb, ...), or its total memory as torch"
        " reports it: 23.5GiB or 23.5GiB,sm_89.",
    )
    num_gpus: int | None = option(
        MOST_USED, "Number of GPUs that train together (default: from --accelerate-config, else 1)."
    )
    accelerate_config: Path | None = option(MOST_USED, "The config file for accelerate launch.")
    host_memory: str | None = option(
        _MACHINE, "Main memory per node, as in 252GB (default: not checked)."
    )
    pinned_memory: str | None = option(_MACHINE, PINNED_MEMORY_HELP)
    vllm_utilization: float | None = option(
        _MACHINE, "Share of the card for vLLM, with --trainer grpo, rloo or gmpo."
    )
    calibration: bool = option(
        _MACHINE, "Use the context size measured here for this card.", default=True
    )
    timeout: float = option(_MACHINE, "Time limit of each dry run.", default=600, metavar="SECONDS")

    # no options: filled from the words around them, or only from Python
    training_args: object = None  # TrainingArguments, a dict of their fields, or flags
    quantization_config: object = None  # a BitsAndBytesConfig, or a dict of its fields
    allocator: str | None = None  # the text of PYTORCH_ALLOC_CONF; None: as in this process


_LARGEST_LORA_RANK = 1 << 20
_QUANTISES = [each.name for each in fields(RunOptions) if each.name.startswith(("load_in", "bnb"))]
"""Options that are fields of a BitsAndBytesConfig, under their own names."""


def options_in(words: Sequence[str]) -> RunOptions:
    """Parse the options and TrainingArguments of a command that `explain` has written.

    >>> options_in(["--seq-length", "8", "--load-in-4bit", "--bf16", "True"]).training_args
    ('--bf16', 'True')
    """
    defaults = {each.name: each.default for each in fields(RunOptions)}
    given: dict[str, Any] = {}
    flags, left = list[str](), iter(words)
    for word in left:
        name = word.removeprefix("--").replace("-", "_")
        if defaults.get(name) is False:
            given[name] = True
        elif name in defaults:
            value = next(left)
            given[name] = int(value) if value.isdecimal() else value
        else:
            flags += [word, next(left)]
    return complete(RunOptions(**given), flags)


def complete(run: RunOptions, flags: Sequence[str]) -> RunOptions:
    """Return options with those filled in that combine several; `flags` are TrainingArguments."""
    quantisation = {name: value for name in _QUANTISES if (value := getattr(run, name))}
    return replace(
        run,
        training_args=(*flags, *_vllm_flags(run.trainer, run.vllm_utilization)),
        peft_config=_adapter(run),
        quantization_config=quantisation or None,
    )


def _vllm_flags(trainer: str | None, share: float | None) -> tuple[str, ...]:
    if share is None:
        return ()
    if trainer not in ("grpo", "rloo", "gmpo"):
        raise PlanError("--vllm-utilization needs --trainer grpo, rloo or gmpo")
    if not 0 < share < 1:
        raise PlanError(f"--vllm-utilization is a share of the card below 1, got {share}")
    utilization = SMALLER_ENGINE_SHARE.flag(Door.TRL, share=share).split()
    return ("--use_vllm=True", "--vllm_mode=colocate", *utilization)


def _adapter(options: RunOptions) -> dict[str, object] | None:
    rank, target = options.lora_r, options.lora_target
    if options.peft_config is not None:
        if rank is not None:
            raise PlanError("--lora-r and --peft-config both name an adapter to train: choose one")
        return _read_adapter(options.peft_config)
    if rank is None:
        return None
    if not 1 <= rank <= _LARGEST_LORA_RANK:
        raise PlanError(f"--lora-r is a rank from 1 to {_LARGEST_LORA_RANK:,}, got {rank:,}")
    modules = target if target == "all-linear" else [name.strip() for name in target.split(",")]
    return {"peft_type": "LORA", "r": rank, "target_modules": modules}


def _read_adapter(given: str) -> dict[str, object]:
    try:
        content = json.loads(given if given.lstrip().startswith("{") else Path(given).read_text())
    except (ValueError, RecursionError) as error:
        raise PlanError(f"--peft-config: {given} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise PlanError(f"--peft-config: {given} holds no mapping")
    return content
