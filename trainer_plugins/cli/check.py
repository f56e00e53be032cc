"""`trainer-plugins check`: find before a launch what usually ends a run hours later."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainer_plugins.finding import Severity
from trainer_plugins.printable import printable
from trainer_plugins.units import MIB

if TYPE_CHECKING:
    from trainer_plugins.check import Checklist
    from trainer_plugins.check.facts import Facts, RunSettings
    from trainer_plugins.launch.lint import Document
    from trainer_plugins.planner.plan import MemoryPlan
    from trainer_plugins.planner.request import PlanRequest

_EXIT_BAD_INPUT = 2
_EXIT_CODES = {Severity.INFO: 0, Severity.WARNING: 1, Severity.ERROR: 3}
_ONLY_PLAN = ("search", "search_lengths", "explain_change", "compare", "run_dir", "html")


def check(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine, and with --model a run, before it is launched.

    All flags of `trainer-plugins plan` may follow: --model, --seq-length, --accelerate-config,
    --host-memory, those of TrainingArguments. Without --model it takes a second, and imports no
    torch.

    Example: trainer-plugins check --model config.json --gpu 24GiB --bf16

    Exit codes: 0 nothing was found, 1 warnings, 3 errors that will end the run, 2 bad input.
    """
    from trainer_plugins.check import judge
    from trainer_plugins.launch.lint import ConfigError
    from trainer_plugins.planner.plan import PlanError

    parent: Any = context.parent
    command = parent.command.get_command(parent, "plan")
    asked = command.make_context(context.info_name, list(context.args), parent=parent)
    try:
        for name in _ONLY_PLAN:
            if asked.params[name]:
                raise PlanError(f"--{name.replace('_', '-')} is for `trainer-plugins plan`")
        checklist = judge(_facts(asked.params, asked.args))
    except (ConfigError, PlanError, OSError) as error:
        print(f"trainer-plugins check: {printable(error)}", file=sys.stderr)
        raise typer.Exit(_EXIT_BAD_INPUT) from error
    _show(checklist, as_json)
    raise typer.Exit(_EXIT_CODES[checklist.worst])


def _facts(given: Mapping[str, Any], flags: list[str]) -> "Facts":
    """Gather what a command line names and what this machine shows.

    Raises:
        ConfigError: the launch file or the flags cannot be read.
        PlanError: what was given for a plan is wrong.
    """
    from trainer_plugins.check.gather_here import gather_here
    from trainer_plugins.launch.argument_names import unknown_argument
    from trainer_plugins.launch.lint import training_arguments
    from trainer_plugins.planner.plan import PlanError

    values = training_arguments(flags)
    # With a model, the plan reads them, and knows TRL's too.
    if given["model"] is None and given["trainer"] is None and (why := unknown_argument(values)):
        raise PlanError(why)
    facts = gather_here(os.environ, _document(given["accelerate_config"], values))
    if values or given["model"] is not None:
        facts = replace(facts, run=_run(values, given))
    card = _card(facts, given["gpu"])
    if card is not None:
        size_bytes, free_bytes, capability = card
        facts = replace(
            facts, device_bytes=size_bytes, device_free_bytes=free_bytes, capability=capability
        )
    return facts if given["model"] is None else _with_model(facts, given, flags)


def _document(file: Path | None, values: Mapping[str, object]) -> "Document | None":
    """Read the file that accelerate will get, or else the one that --deepspeed names."""
    from trainer_plugins.launch.lint import read_document

    named = values.get("deepspeed") if file is None else file
    return read_document(Path(named)) if isinstance(named, (str, Path)) else None


def _run(values: Mapping[str, object], given: Mapping[str, Any]) -> "RunSettings":
    from trainer_plugins.check.facts import RunSettings, folder_of
    from trainer_plugins.check.gather_here import folder_trouble

    folder = folder_of(values)
    return RunSettings(
        values=values,
        has_metrics=given["metrics"],
        local_ranks=given["num_gpus"] or 1,
        folder_trouble=folder_trouble(folder) if "output_dir" in values else "",
    )


def _card(facts: "Facts", gpu: str | None) -> tuple[int, int, tuple[int, int] | None] | None:
    """Return size, free bytes and compute capability: of the named card, or of the fullest seen."""
    from trainer_plugins.check.machine import cards_in_use
    from trainer_plugins.planner.cards import card_of

    if gpu is not None:
        named = card_of(gpu)
        # A mere size is of no known kind.
        kind = None if gpu.strip()[:1].isdigit() else named.capability
        return named.capacity_bytes, named.capacity_bytes, kind
    seen = [
        (card.reading.free_bytes, card.reading.total_bytes, card.capability)
        for card in cards_in_use(facts)
        if card.reading is not None
    ]
    if not seen:
        return None
    free_bytes, total_bytes, capability = min(seen, key=lambda each: each[0])
    return total_bytes, free_bytes, capability


def _with_model(facts: "Facts", given: Mapping[str, Any], flags: list[str]) -> "Facts":
    """Add what the config of a model tells, and a plan.

    Raises:
        PlanError: the input of the plan is wrong.
    """
    from trainer_plugins.check.facts import DataFacts
    from trainer_plugins.cli.plan import plan_request
    from trainer_plugins.planner.inputs import read_config
    from trainer_plugins.planner.plan import NotPredicted
    from trainer_plugins.planner.predict import predict_one

    assert facts.run is not None
    length = given["seq_length"]
    facts = replace(
        facts,
        model=_model(read_config(given["model"], given["from_hub"]), facts.run),
        data=DataFacts(
            lengths=(length,),
            longest_target=given["target_length"] or length,
            longest_evaluation=given["target_length"] or length,
            num_evaluation_rows=given["eval_batches"]
            * facts.run.number("per_device_eval_batch_size", 8),
        ),
    )
    here = None if facts.device_bytes is None else f"{facts.device_bytes // MIB}MiB"
    named = {**given, "gpu": given["gpu"] or here}
    try:
        request = plan_request(named, flags)
        plan = predict_one(request, given["timeout"])
    except NotPredicted as error:
        return replace(facts, no_plan=str(error))
    return replace(facts, plan=plan, streamed_plan=_streamed(request, plan, given["timeout"]))


def _streamed(request: "PlanRequest", plan: "MemoryPlan", seconds: float) -> "MemoryPlan | None":
    """Plan a run that does not fit with its frozen base streamed; None if that is refused."""
    from trainer_plugins.planner.compare.switches import with_base_streamed
    from trainer_plugins.planner.plan import PlanError
    from trainer_plugins.planner.predict import predict_one

    if plan.fits_card is not False:
        return None
    try:
        return predict_one(with_base_streamed(request), seconds)
    except PlanError:
        return None


def _model(config: Mapping[str, object], run: "RunSettings") -> Any:
    from trainer_plugins.check.facts import ModelFacts
    from trainer_plugins.check.shape import predicts_tokens, shape_of

    classes = config.get("architectures")
    name = str(classes[0]) if isinstance(classes, list) and classes else ""
    return ModelFacts(
        name=name,
        shape=shape_of(config),
        predicts_tokens=predicts_tokens(name) or not name,
        makes_no_logits=run.flag("use_liger_kernel"),
        attention=str(config.get("_attn_implementation") or "sdpa"),  # transformers' default
    )


def _show(checklist: "Checklist", as_json: bool) -> None:
    if not as_json:
        from trainer_plugins.report.check import check_report
        from trainer_plugins.report.page import show

        show(check_report(checklist))
        return
    groups = {
        name: [
            {**asdict(line), "findings": [each.as_json() for each in line.findings]}
            for line in lines
        ]
        for name, lines in checklist.groups
    }
    print(json.dumps({"worst": checklist.worst.name, "groups": groups}, indent=2))
