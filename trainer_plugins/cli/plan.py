"""`trainer-plugins plan`: predict what a run will need of its card, before it is launched."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from trainer_plugins.cli.configs import PinnedMemory
from trainer_plugins.printable import printable

if TYPE_CHECKING:
    from trainer_plugins.planner import Calibration, MemoryPlan
    from trainer_plugins.planner.request import PlanRequest

_EXIT_BAD_INPUT = 2
_EXIT_DOES_NOT_FIT = 3

_Model: TypeAlias = Annotated[
    str | None, typer.Option(help="A config.json, its folder, or org/name in the hub's cache here.")
]
_FromHub: TypeAlias = Annotated[
    bool, typer.Option("--from-hub", help="Fetch the config.json of --model org/name, no more.")
]
_Trainer: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="A Trainer of TRL's: sft, dpo, kto, reward, grpo, rloo, gmpo, orpo, cpo, tpo. Then "
        "all flags of its config may follow.",
    ),
]
_VllmUtilization: TypeAlias = Annotated[
    float | None,
    typer.Option(
        help="With --trainer grpo, rloo or gmpo: the part of the card that vLLM takes on it."
    ),
]
_SeqLength: TypeAlias = Annotated[int, typer.Option(help="Tokens of each row.")]
_TargetLength: TypeAlias = Annotated[
    int | None,
    typer.Option(help="Tokens of each label of an encoder-decoder; --seq-length if not given."),
]
_NumLabels: TypeAlias = Annotated[
    int | None,
    typer.Option(help="Train a classifier of so many labels; if not given, as the config says."),
]
_ImagesPerRow: TypeAlias = Annotated[
    int | None,
    typer.Option(help="Pictures of each row of a vision-language model; 1 if not given."),
]
_ImageSize: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="HxW", help="Size of a picture in pixels; if not given, the plan says."),
]
_SoundSeconds: TypeAlias = Annotated[
    float | None,
    typer.Option(metavar="S", help="Seconds of each sound; 16,000 samples a second."),
]
_Dtype: TypeAlias = Annotated[
    str | None, typer.Option(help="Dtype of the loaded weights: bfloat16, float16, float32.")
]
_LoraR: TypeAlias = Annotated[int | None, typer.Option(help="Train LoRA adapters of this rank.")]
_LoraTarget: TypeAlias = Annotated[
    str, typer.Option(help="The modules that get an adapter: all-linear, or names with commas.")
]
_PeftConfig: TypeAlias = Annotated[
    Path | None, typer.Option(help="An adapter_config.json of peft, instead of --lora-r.")
]
_LoadIn4bit: TypeAlias = Annotated[
    bool, typer.Option("--load-in-4bit", help="Quantise the base with bitsandbytes, as QLoRA does.")
]
_LoadIn8bit: TypeAlias = Annotated[
    bool, typer.Option("--load-in-8bit", help="Quantise the base with bitsandbytes to int8.")
]
_QuantType: TypeAlias = Annotated[
    str | None,
    typer.Option(help="With --load-in-4bit: nf4 or fp4, which is bitsandbytes' default."),
]
_DoubleQuant: TypeAlias = Annotated[
    bool, typer.Option("--bnb-4bit-use-double-quant", help="Quantise the scales too.")
]
_ComputeDtype: TypeAlias = Annotated[
    str | None, typer.Option(help="With --load-in-4bit: in what it computes; float32 if not given.")
]
_QuantStorage: TypeAlias = Annotated[
    str | None,
    typer.Option(help="With --load-in-4bit: the dtype of the packed weights, as in FSDP."),
]
_PrepareKbit: TypeAlias = Annotated[
    bool | None,
    typer.Option(help="Whether prepare_model_for_kbit_training gets a quantised base. It does."),
]
_StreamBase: TypeAlias = Annotated[
    int | None,
    typer.Option(metavar="K", help="Stream the frozen base (StreamBase): K layers on the card."),
]
_StreamEmbeddings: TypeAlias = Annotated[
    bool, typer.Option("--stream-embeddings", help="With --stream-base: embeddings and head too.")
]
_Gpu: TypeAlias = Annotated[
    str | None, typer.Option(help="The card: h100-80gb, or a size as in 24GiB.")
]
_NumGpus: TypeAlias = Annotated[
    int | None,
    typer.Option(help="How many cards train together; if not given, as accelerate's file, or 1."),
]
_AccelerateConfig: TypeAlias = Annotated[
    Path | None, typer.Option(help="The config file that accelerate launch will get.")
]
_HostMemory: TypeAlias = Annotated[
    str | None, typer.Option(help="Main memory of a machine, as in 252GB: it has to fit there too.")
]
_Padding: TypeAlias = Annotated[
    bool | None,
    typer.Option(help="Whether batches have padding. If not given, those of several rows do."),
]
_EvalBatches: TypeAlias = Annotated[
    int, typer.Option(help="How many batches an evaluation has, if there is one.")
]
_Metrics: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--metrics", help="The Trainer has a compute_metrics: an evaluation keeps all outputs."
    ),
]
_Search: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--search", help="Find the largest micro-batches that fit; the effective batch stays."
    ),
]
_SearchLengths: TypeAlias = Annotated[
    str | None,
    typer.Option(help="With --search: lengths to try, with commas; --seq-length if not given."),
]
_ExplainChange: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SWITCH",
        help="What a switch would save: a name, several with +, or all. Repeatable.",
    ),
]
_Compare: TypeAlias = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        metavar="A B",
        help="Print two sides by moment and category: plans as JSON, or folders of runs.",
    ),
]
_Timeout: TypeAlias = Annotated[
    float, typer.Option(help="Give up after so many seconds; a search: for each way to run.")
]
_AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")]
_RunDir: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--calibrate", help="Compare with this output_dir of the real run, and keep its context."
    ),
]
_UseCalibration: TypeAlias = Annotated[
    bool, typer.Option(help="Use the context that was measured here for the card.")
]
_Html: TypeAlias = Annotated[
    Path | None, typer.Option(help="Write the plan, with its timeline, as a page to this file.")
]


def plan(
    context: typer.Context,
    model: _Model = None,
    from_hub: _FromHub = False,
    trainer: _Trainer = None,
    seq_length: _SeqLength = 2048,
    target_length: _TargetLength = None,
    num_labels: _NumLabels = None,
    images_per_row: _ImagesPerRow = None,
    image_size: _ImageSize = None,
    sound_seconds: _SoundSeconds = None,
    dtype: _Dtype = None,
    lora_r: _LoraR = None,
    lora_target: _LoraTarget = "all-linear",
    peft_config: _PeftConfig = None,
    load_in_4bit: _LoadIn4bit = False,
    load_in_8bit: _LoadIn8bit = False,
    bnb_4bit_quant_type: _QuantType = None,
    bnb_4bit_use_double_quant: _DoubleQuant = False,
    bnb_4bit_compute_dtype: _ComputeDtype = None,
    bnb_4bit_quant_storage: _QuantStorage = None,
    prepare_kbit: _PrepareKbit = None,
    stream_base: _StreamBase = None,
    stream_embeddings: _StreamEmbeddings = False,
    gpu: _Gpu = None,
    vllm_utilization: _VllmUtilization = None,
    num_gpus: _NumGpus = None,
    accelerate_config: _AccelerateConfig = None,
    host_memory: _HostMemory = None,
    pinned_memory: PinnedMemory = None,
    padding: _Padding = None,
    eval_batches: _EvalBatches = 8,
    metrics: _Metrics = False,
    search: _Search = False,
    search_lengths: _SearchLengths = None,
    explain_change: _ExplainChange = None,
    compare: _Compare = None,
    timeout: _Timeout = 600,
    as_json: _AsJson = False,
    run_dir: _RunDir = None,
    calibration: _UseCalibration = True,
    html: _Html = None,
) -> None:
    """Predict the peak of a training run without a GPU. All flags of TrainingArguments may follow.

    Example: trainer-plugins plan --model config.json --gpu 24GiB --per_device_train_batch_size 4

    Exit codes: 0 it fits, or no card was named; 3 it does not; 2 the input cannot be predicted.
    """
    from trainer_plugins.planner.plan import PlanError

    try:
        if compare is not None:
            raise typer.Exit(_show_beside(*compare, as_json))
        is_table = search or search_lengths is not None or bool(explain_change)
        _check_places(html, run_dir, is_table)
        fits = _table(context) if is_table else _one_plan(context, timeout, as_json, run_dir, html)
    except (PlanError, OSError) as error:
        raise _refused(error) from error
    raise typer.Exit(_EXIT_DOES_NOT_FIT if fits is False else 0)


def _refused(error: Exception) -> typer.Exit:
    print(f"trainer-plugins plan: {printable(error)}", file=sys.stderr)
    return typer.Exit(_EXIT_BAD_INPUT)


def plan_request(given: Mapping[str, Any], arguments: list[str]) -> "PlanRequest":
    """Make the request of a command line: its options by name, and what follows them."""
    from trainer_plugins.cli.plan_flags import of_an_adapter, of_vllm
    from trainer_plugins.planner.inputs import ConfigInputs, RunInputs, request_of
    from trainer_plugins.planner.plan import PlanError

    if given["model"] is None:
        raise PlanError("name the model: --model with a config.json, its folder, or org/name")
    details = ConfigInputs(
        training_args=(*_flags(arguments), *of_vllm(given["trainer"], given["vllm_utilization"])),
        num_labels=given["num_labels"],
        images_per_row=given["images_per_row"],
        image_size=given["image_size"],
        sound_seconds=given["sound_seconds"],
        trainer=given["trainer"],
        seq_length=given["seq_length"],
        target_length=given["target_length"],
        dtype=given["dtype"],
        peft_config=of_an_adapter(given["lora_r"], given["lora_target"], given["peft_config"]),
        accelerate_config=given["accelerate_config"],
        num_evaluation_batches=given["eval_batches"],
        has_metrics=given["metrics"],
        quantization_config=_quantisation(given),
        prepare_kbit=given["prepare_kbit"],
        resident_layers=given["stream_base"],
        streams_embeddings=given["stream_embeddings"],
        from_hub=given["from_hub"],
    )
    run = RunInputs(
        gpu=given["gpu"],
        calibration=given["calibration"] and given["run_dir"] is None,
        num_gpus=given["num_gpus"],
        has_padding=given["padding"],
        host_memory=given["host_memory"],
        pinned_memory=given["pinned_memory"],
    )
    return request_of(given["model"], details, run)


def _in_full(context: typer.Context) -> "PlanRequest":
    """Make the request of a command line, and ask also for the command, and for what would fit."""
    from trainer_plugins.cli.again import command_of

    request = plan_request(context.params, context.args)
    return replace(request, proposes=True, command=command_of(context))


def _quantisation(given: Mapping[str, object]) -> dict[str, object] | None:
    """Return the flags of a BitsAndBytesConfig that were given; None if there are none."""
    prefixes = ("load_in_", "bnb_4bit_")
    asked = {name: value for name, value in given.items() if value and name.startswith(prefixes)}
    return asked or None


def _check_places(html: Path | None, run_dir: Path | None, is_table: bool) -> None:
    """Refuse places that cannot be written or read, before anything is predicted."""
    from trainer_plugins.planner.calibrate import timelines_of
    from trainer_plugins.planner.plan import PlanError

    if is_table and (html is not None or run_dir is not None):
        raise PlanError("--html and --calibrate are for one plan, not for a table of many")
    if html is not None and (html.is_dir() or not html.absolute().parent.is_dir()):
        raise PlanError(f"--html: {html} must be a file in a folder that exists")
    if run_dir is not None:
        timelines_of(run_dir)


def _table(context: typer.Context) -> bool | None:
    """Print a table of many predictions, and return whether the run, or any line of it, fits."""
    from trainer_plugins.cli.plan_search import explain_changes, search_batches
    from trainer_plugins.planner.plan import PlanError

    given = context.params
    request = plan_request(given, context.args)
    lengths, switches = given["search_lengths"], given["explain_change"]
    if given["search"] and switches:
        raise PlanError("--search and --explain-change ask for different tables: give one")
    if not given["search"] and lengths is not None:
        raise PlanError("--search-lengths belongs to --search")
    if switches:
        return explain_changes(request, switches, given["timeout"], given["as_json"])
    return search_batches(request, lengths, given["timeout"], given["as_json"])


def _one_plan(
    context: typer.Context,
    timeout_seconds: float,
    as_json: bool,
    run_dir: Path | None,
    html: Path | None,
) -> bool | None:
    """Print one plan, and return whether the run fits."""
    from trainer_plugins.planner.calibrate import calibrate
    from trainer_plugins.planner.predict import predict_one

    outcome = predict_one(_in_full(context), timeout_seconds, _say)
    compared = calibrate(outcome, run_dir) if run_dir is not None else None
    if html is not None:
        from trainer_plugins.report.html.plan_page import plan_page

        html.write_text(plan_page(outcome), encoding="utf-8")
    if as_json:
        more = {} if compared is None else {"calibration": asdict(compared)}
        print(json.dumps({**asdict(outcome), **more}, indent=2, default=str))
    else:
        _show(outcome, compared)
    return outcome.fits


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _show_beside(a: Path, b: Path, as_json: bool) -> int:
    from trainer_plugins.planner.compare.beside import beside

    found = beside(a, b)
    if as_json:
        print(json.dumps(asdict(found), indent=2))
        return 0
    from trainer_plugins.report.beside import beside_report
    from trainer_plugins.report.page import show

    show(beside_report(found))
    return 0


def _show(outcome: "MemoryPlan", compared: "Calibration | None") -> None:
    from trainer_plugins.report.page import show
    from trainer_plugins.report.plan_text import plan_report

    show(plan_report(outcome))
    if compared is not None:
        from trainer_plugins.report.calibration import calibration_report

        show(calibration_report(compared))


def _flags(arguments: list[str]) -> tuple[str, ...]:
    """Return the flags of TrainingArguments. They need an output_dir; a plan writes nothing."""
    given = any(
        argument.split("=")[0] in ("--output_dir", "--output-dir") for argument in arguments
    )
    return (*arguments, *(() if given else ("--output_dir", "runs")))
