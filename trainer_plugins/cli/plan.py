"""`trainer-plugins plan`: what a run will need of its card, before it is launched."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from trainer_plugins.printable import printable

_EXIT_BAD_INPUT = 2
_EXIT_DOES_NOT_FIT = 3
_LARGEST_RANK = 1 << 20


def plan(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="A config.json of a model, or a folder that has one.")],
    seq_length: Annotated[int, typer.Option(help="Tokens of each row.")] = 2048,
    target_length: Annotated[
        int | None,
        typer.Option(help="Tokens of each label of an encoder-decoder; --seq-length unless given."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="In which the weights are loaded: bfloat16, float16, float32."),
    ] = None,
    lora_r: Annotated[int | None, typer.Option(help="Train LoRA adapters of this rank.")] = None,
    lora_target: Annotated[
        str, typer.Option(help="Their modules: all-linear, or names with commas.")
    ] = "all-linear",
    peft_config: Annotated[
        Path | None, typer.Option(help="An adapter_config.json of peft, in place of --lora-r.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="The card: h100-80gb, or a size as in 24GiB.")
    ] = None,
    num_gpus: Annotated[
        int | None,
        typer.Option(help="How many cards train together; as the file of accelerate says, else 1."),
    ] = None,
    accelerate_config: Annotated[
        Path | None, typer.Option(help="The file of accelerate that launches.")
    ] = None,
    padding: Annotated[
        bool | None,
        typer.Option(help="Whether batches have padding. Unless said, those of several rows do."),
    ] = None,
    eval_batches: Annotated[
        int, typer.Option(help="How many batches evaluation has, where there is one.")
    ] = 8,
    search: Annotated[
        bool,
        typer.Option(
            "--search", help="Find the largest micro-batches that fit, the effective batch kept."
        ),
    ] = False,
    search_lengths: Annotated[
        str | None,
        typer.Option(help="With --search: lengths to try, with commas; --seq-length unless given."),
    ] = None,
    explain_change: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SWITCH",
            help="What a switch would save: a name, several with +, or all. Repeatable.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Give up after so many seconds; a search: for each way to run.")
    ] = 600,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--calibrate",
            help="Compare with this output_dir of the real run, and keep its context.",
        ),
    ] = None,
    calibration: Annotated[
        bool, typer.Option(help="Count the context that was measured here for the card.")
    ] = True,
    html: Annotated[
        Path | None, typer.Option(help="Write the plan, with its timeline, as a page to this file.")
    ] = None,
) -> None:
    """Predict the peak of a training run without a GPU. All flags of TrainingArguments may follow.

    Exit codes: 0 it fits, or no card was named; 3 it does not; 2 the input is wrong, or cannot be
    predicted.
    """
    from trainer_plugins.planner.calibrate import calibrate, timelines_of
    from trainer_plugins.planner.cards import card_of
    from trainer_plugins.planner.contexts import with_measured_context
    from trainer_plugins.planner.plan import PlanError
    from trainer_plugins.planner.request import ConfigSource, PlanRequest
    from trainer_plugins.planner.run import allocator_text, predict_all, read_config

    try:
        if num_gpus is not None and num_gpus < 1:
            raise PlanError(f"--num-gpus: a run needs at least one, got {num_gpus}")
        if html is not None and (html.is_dir() or not html.absolute().parent.is_dir()):
            raise PlanError(f"--html: {html} is no file in a folder that is there")
        if run_dir is not None:
            timelines_of(run_dir)  # what is wrong with them is said before anything is predicted
        card = card_of(gpu) if gpu is not None else None
        if card is not None and calibration and run_dir is None:
            card = with_measured_context(card)
        request = PlanRequest(
            source=ConfigSource(
                config=read_config(Path(model)),
                arguments=_flags(context.args),
                sequence_length=seq_length,
                target_length=target_length,
                dtype=dtype,
                peft=_adapter(lora_r, lora_target, peft_config),
                num_evaluation_batches=eval_batches,
            ),
            card=card,
            allocator=allocator_text(),
            num_gpus=num_gpus or 0,
            launch_file=str(accelerate_config) if accelerate_config is not None else None,
            has_padding=padding,
        )
        if search or search_lengths is not None or explain_change:
            from trainer_plugins.cli.plan_search import explain_changes, search_batches

            if search and explain_change:
                raise PlanError("--search and --explain-change ask for different tables: give one")
            if not search and search_lengths is not None:
                raise PlanError("--search-lengths belongs to --search")
            if html is not None or run_dir is not None:
                raise PlanError("--html and --calibrate are for one plan, not for a table of many")
            fits = (
                explain_changes(request, explain_change, timeout, as_json)
                if explain_change
                else search_batches(request, search_lengths, timeout, as_json)
            )
            raise typer.Exit(0 if fits is not False else _EXIT_DOES_NOT_FIT)
        (outcome,) = predict_all([request], timeout)
        if isinstance(outcome, PlanError):
            raise outcome
        found = calibrate(outcome, run_dir) if run_dir is not None else None
        if html is not None:
            from trainer_plugins.report.plan_html import plan_page

            html.write_text(plan_page(outcome), encoding="utf-8")
    except (PlanError, OSError) as error:
        print(f"trainer-plugins plan: {printable(error)}", file=sys.stderr)
        raise typer.Exit(_EXIT_BAD_INPUT) from error
    if as_json:
        compared = {} if found is None else {"calibration": asdict(found)}
        print(json.dumps({**asdict(outcome), **compared}, indent=2, default=str))
    else:
        from trainer_plugins.report.page import show
        from trainer_plugins.report.plan import plan_report

        show(plan_report(outcome))
        if found is not None:
            from trainer_plugins.report.calibration import calibration_report

            show(calibration_report(found))
    if outcome.fits is False:
        raise typer.Exit(_EXIT_DOES_NOT_FIT)


def _flags(arguments: list[str]) -> tuple[str, ...]:
    """Those of TrainingArguments, which wants a folder to write to; a plan writes nothing."""
    given = any(
        argument.split("=")[0] in ("--output_dir", "--output-dir") for argument in arguments
    )
    return (*arguments, *(() if given else ("--output_dir", "runs")))


def _adapter(rank: int | None, target: str, file: Path | None) -> dict[str, Any] | None:
    from trainer_plugins.planner.plan import PlanError

    if file is None and rank is None:
        return None
    if file is None:
        if rank is not None and not 1 <= rank <= _LARGEST_RANK:
            raise PlanError(f"--lora-r is a rank from 1 to {_LARGEST_RANK:,}, got {rank:,}")
        modules = target if target == "all-linear" else [name.strip() for name in target.split(",")]
        return {"peft_type": "LORA", "r": rank, "target_modules": modules}
    if rank is not None:
        raise PlanError("--lora-r and --peft-config both say which adapter to train: give one")
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise PlanError(f"--peft-config: {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"--peft-config: {file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise PlanError(f"--peft-config: {file} is no mapping")
    return content
