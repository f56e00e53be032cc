"""Lists the options of `trainer-plugins plan` that describe a run; `check` takes them too."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from trainer_plugins.cli.typed_options import MOST_USED, option

PINNED_MEMORY_HELP = "How much of it can be pinned, as in 2GiB (WSL has a limit)."


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Names the model and the class of Trainer."""

    panel: ClassVar[str] = "Model"

    model: str | None = option(
        "A config.json, its folder, or org/name in the local hub cache.", panel=MOST_USED
    )
    from_hub: bool = option("Download the config.json of --model org/name.", default=False)
    dtype: str | None = option(
        "Load weights as bfloat16, float16 or float32 (default: as from_pretrained)."
    )
    attn_implementation: str | None = option(
        "Attention: eager, sdpa or flash_attention_2 (default: as the config says)."
    )
    head: str | None = option(
        "What is trained on top, as in TokenClassification (default: as the config says)."
    )
    trainer: str | None = option(
        "Trainer of TRL: sft, dpo, kto, reward, grpo, rloo, gmpo, orpo, cpo or tpo; it takes all"
        " flags of its config (default: transformers.Trainer).",
        metavar="NAME",
    )
    num_labels: int | None = option("Number of labels (default: from the config).")


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Describes the rows, and what an evaluation does with them."""

    panel: ClassVar[str] = "Data and evaluation"

    seq_length: int | None = option(
        "Tokens in each row (default: 2048; 1024 where TRL cuts rows there).",
        panel=MOST_USED,
    )
    target_length: int | None = option(
        "Tokens in each label of an encoder-decoder (default: --seq-length)."
    )
    images_per_row: int | None = option(
        "Images in each row of a vision-language model (default: 1)."
    )
    image_size: str | None = option(
        "Pixels of an image (default: from the config; printed).", metavar="HxW"
    )
    sound_seconds: float | None = option(
        "Seconds of audio in each row, at 16,000 samples a second.", metavar="S"
    )
    padding: bool | None = option(
        "Whether batches have padding (default: if a batch has several rows)."
    )
    eval_batches: int = option("Number of batches in an evaluation.", default=8)
    metrics: bool = option(
        "The Trainer has a compute_metrics, so an evaluation keeps all outputs.", default=False
    )


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Says which adapter is trained, and whether its base is streamed."""

    panel: ClassVar[str] = "Adapters and a frozen base"

    lora_r: int | None = option(
        "Rank of LoRA adapters (default: train all weights).", panel=MOST_USED
    )
    lora_target: str = option(
        "Modules that get an adapter: all-linear, or names with commas.", default="all-linear"
    )
    peft_config: str | None = option(
        "An adapter_config.json of PEFT, or its JSON, instead of --lora-r."
    )
    prepare_kbit: bool | None = option(
        "Prepare a quantised base for k-bit training (default: yes)."
    )
    stream_base: int | None = option(
        "Stream the frozen base: keep K layers on the card.", metavar="K"
    )
    stream_embeddings: bool = option(
        "With --stream-base: stream embeddings and head too.", default=False
    )


@dataclass(frozen=True, kw_only=True)
class QuantisationOptions:
    """Holds fields of a BitsAndBytesConfig under their own names."""

    panel: ClassVar[str] = "Quantisation"

    load_in_4bit: bool = option(
        "Quantise the base to 4 bits (QLoRA).", default=False, panel=MOST_USED
    )
    load_in_8bit: bool = option("Quantise the base to int8.", default=False)
    bnb_4bit_quant_type: str | None = option(
        "Data type of 4-bit weights: nf4 or fp4 (default: fp4)."
    )
    bnb_4bit_use_double_quant: bool = option("Quantise the scales too.", default=False)
    bnb_4bit_compute_dtype: str | None = option("Dtype of matrix products (default: float32).")
    bnb_4bit_quant_storage: str | None = option("Dtype that packs 4-bit weights (default: uint8).")


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Describes the cards, the main memory and the launch."""

    panel: ClassVar[str] = "Machine"

    gpu: str | None = option(
        "The card: a name (t4, rtx4090, a100-80gb, h100-80gb, ...), or what torch can use of it, as"
        " in 23.5GiB or 23.5GiB,sm_89.",
        panel=MOST_USED,
    )
    num_gpus: int | None = option(
        "Cards that train together (default: from --accelerate-config, else 1).", panel=MOST_USED
    )
    accelerate_config: Path | None = option(
        "The config file for accelerate launch.", panel=MOST_USED
    )
    host_memory: str | None = option("Main memory of a machine, as in 252GB (default: not judged).")
    pinned_memory: str | None = option(PINNED_MEMORY_HELP)
    vllm_utilization: float | None = option(
        "Share of the card for vLLM, with --trainer grpo, rloo or gmpo."
    )
    calibration: bool = option(
        "Use the context size that was measured here for this card.", default=True
    )
    timeout: float = option("Time limit of each dry run.", default=600, metavar="SECONDS")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Describes one run."""

    model: ModelOptions
    data: DataOptions
    adapter: AdapterOptions
    quantisation: QuantisationOptions
    machine: MachineOptions
