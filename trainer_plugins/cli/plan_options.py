"""Lists the options of `trainer-plugins plan` that describe a run; `check` takes them too."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar

from typer import Option

from trainer_plugins.cli.typed_options import MOST_USED

_often_used = partial(Option, rich_help_panel=MOST_USED)

PinnedMemory = Annotated[
    str | None, Option(help="How much of it can be pinned, as in 2GiB (WSL has a limit).")
]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Names the model and the class of Trainer."""

    panel: ClassVar[str] = "Model"

    model: Annotated[
        str | None,
        _often_used(help="A config.json, its folder, or org/name in the local hub cache."),
    ] = None
    from_hub: Annotated[
        bool, Option("--from-hub", help="Download the config.json of --model org/name.")
    ] = False
    dtype: Annotated[
        str | None,
        Option(help="Load weights as bfloat16, float16 or float32 (default: as from_pretrained)."),
    ] = None
    trainer: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Trainer of TRL: sft, dpo, kto, reward, grpo, rloo, gmpo, orpo, cpo or tpo; it"
            " takes all flags of its config (default: transformers.Trainer).",
        ),
    ] = None
    num_labels: Annotated[
        int | None, Option(help="Number of labels (default: from the config).")
    ] = None


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Describes the rows, and what an evaluation does with them."""

    panel: ClassVar[str] = "Data and evaluation"

    seq_length: Annotated[int, _often_used(help="Tokens in each row.")] = 2048
    target_length: Annotated[
        int | None,
        Option(help="Tokens in each label of an encoder-decoder (default: --seq-length)."),
    ] = None
    images_per_row: Annotated[
        int | None, Option(help="Images in each row of a vision-language model (default: 1).")
    ] = None
    image_size: Annotated[
        str | None,
        Option(
            metavar="HxW",
            help="Pixels of an image (default: from the config; printed).",
        ),
    ] = None
    sound_seconds: Annotated[
        float | None,
        Option(metavar="S", help="Seconds of audio in each row, at 16,000 samples a second."),
    ] = None
    padding: Annotated[
        bool | None,
        Option(help="Whether batches have padding (default: if a batch has several rows)."),
    ] = None
    eval_batches: Annotated[int, Option(help="Number of batches in an evaluation.")] = 8
    metrics: Annotated[
        bool,
        Option("--metrics", help="A compute_metrics makes evaluations keep all outputs."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Says which adapter is trained, and whether its base is streamed."""

    panel: ClassVar[str] = "Adapters and a frozen base"

    lora_r: Annotated[
        int | None, _often_used(help="Rank of LoRA adapters (default: train all weights).")
    ] = None
    lora_target: Annotated[
        str, Option(help="Modules that get an adapter: all-linear, or names with commas.")
    ] = "all-linear"
    peft_config: Annotated[
        Path | None, Option(help="An adapter_config.json of PEFT, instead of --lora-r.")
    ] = None
    prepare_kbit: Annotated[
        bool | None,
        Option(help="Prepare a quantised base for k-bit training (default: yes)."),
    ] = None
    stream_base: Annotated[
        int | None,
        Option(metavar="K", help="Stream the frozen base: keep K layers on the card."),
    ] = None
    stream_embeddings: Annotated[
        bool,
        Option("--stream-embeddings", help="With --stream-base: stream embeddings and head too."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class QuantisationOptions:
    """Holds fields of a BitsAndBytesConfig under their own names."""

    panel: ClassVar[str] = "Quantisation"

    load_in_4bit: Annotated[
        bool,
        _often_used("--load-in-4bit", help="Quantise the base to 4 bits (QLoRA)."),
    ] = False
    load_in_8bit: Annotated[bool, Option("--load-in-8bit", help="Quantise the base to int8.")] = (
        False
    )
    bnb_4bit_quant_type: Annotated[
        str | None, Option(help="Data type of 4-bit weights: nf4 or fp4 (default: fp4).")
    ] = None
    bnb_4bit_use_double_quant: Annotated[
        bool,
        Option("--bnb-4bit-use-double-quant", help="Quantise the scales too."),
    ] = False
    bnb_4bit_compute_dtype: Annotated[
        str | None, Option(help="Dtype of matrix products (default: float32).")
    ] = None
    bnb_4bit_quant_storage: Annotated[
        str | None, Option(help="Dtype that packs 4-bit weights (default: uint8).")
    ] = None


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Describes the cards, the main memory and the launch."""

    panel: ClassVar[str] = "Machine"

    gpu: Annotated[
        str | None, _often_used(help="The card: a name as in h100-80gb, or a size as in 24GiB.")
    ] = None
    num_gpus: Annotated[
        int | None,
        _often_used(help="Cards that train together (default: from --accelerate-config, else 1)."),
    ] = None
    accelerate_config: Annotated[
        Path | None, _often_used(help="The config file for accelerate launch.")
    ] = None
    host_memory: Annotated[
        str | None, Option(help="Main memory of a machine, as in 252GB (default: not judged).")
    ] = None
    pinned_memory: PinnedMemory = None
    vllm_utilization: Annotated[
        float | None,
        Option(help="Share of the card for vLLM, with --trainer grpo, rloo or gmpo."),
    ] = None
    calibration: Annotated[
        bool, Option(help="Use the context size that was measured here for this card.")
    ] = True
    timeout: Annotated[
        float,
        Option(metavar="SECONDS", help="Time limit; in a search, for each way to run."),
    ] = 600


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Describes one run."""

    model: ModelOptions
    data: DataOptions
    adapter: AdapterOptions
    quantisation: QuantisationOptions
    machine: MachineOptions
