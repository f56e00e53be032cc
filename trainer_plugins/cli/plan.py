"""`trainer-plugins plan`: predict what a run will need of its card, before it is launched."""

import shlex
import shutil
import sys
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from typer import Option

from trainer_plugins.cli.as_json import print_json
from trainer_plugins.cli.plan_dry import (
    DryOptions,
    as_command,
    command_in,
    takes_dry_cards,
    variations_of,
    words_of_flags,
)
from trainer_plugins.cli.plan_options import RunOptions
from trainer_plugins.cli.typed_options import MOST_USED, option, with_options
from trainer_plugins.interrupted import by_any_signal
from trainer_plugins.printable import printable

if TYPE_CHECKING:
    from trainer_plugins.drycuda.dry_search import Variations
    from trainer_plugins.planner.calibrate import Calibration
    from trainer_plugins.planner.plan import MemoryPlan
    from trainer_plugins.planner.request import PlanRequest

_EXIT_BAD_INPUT = 2
_EXIT_DOES_NOT_FIT = 3

AsJson = Annotated[bool, Option("--json", help="Print JSON.", rich_help_panel=MOST_USED)]


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """Says what else to print than a plan for a terminal."""

    panel: ClassVar[str] = "Other answers"

    search: bool = option(
        "Find the largest micro-batches that fit, at the same effective batch.",
        default=False,
        panel=MOST_USED,
    )
    verbose: bool = option(
        "Print everything: figures, tensors, assumptions and changes, or what is well.",
        default=False,
        panel=MOST_USED,
    )
    html: Path | None = option("Write an HTML page of the plan to this file.", panel=MOST_USED)
    search_lengths: str | None = option(
        "With --search: row lengths to try, with commas (default: --seq-length)."
    )
    explain_change: list[str] | None = option(
        "Predict what a switch saves: a name, several joined by +, or all. Repeatable.",
        metavar="SWITCH",
    )
    compare: tuple[Path, Path] | None = option(
        "Compare two plans as JSON, or two folders of runs.", metavar="A B"
    )
    calibrate: Path | None = option(
        "Compare with the real run in this output_dir, and store its context size."
    )


@with_options()
def plan(
    context: typer.Context,
    run: RunOptions,
    answer: AnswerOptions,
    dry: DryOptions,
    as_json: AsJson = False,
) -> None:
    """Predict the peak of a training run without a GPU. All flags of TrainingArguments may follow.

    Example: trainer-plugins plan --model config.json --gpu 24GiB --per_device_train_batch_size 4

    Or run your own command on CUDA cards that compute nothing:

    trainer-plugins plan --gpu 24GiB -- python train.py --learning_rate 1e-5

    Exit codes: 0 it fits, or no card was named; 3 it does not; 2 the input cannot be predicted.
    """
    from trainer_plugins.cli.plan_inputs import inputs_of
    from trainer_plugins.cli.plan_search import explain_changes, search_batches
    from trainer_plugins.planner.inputs import request_of
    from trainer_plugins.planner.plan import PlanError

    seconds = run.machine.timeout
    try:
        if answer.compare is not None:
            _show_compared(*answer.compare, as_json)
            return
        _refuse_contradictions(answer)
        command = command_in(context.args)
        # With --model a stray word is a slip of the pen, if it is no program.
        if command and (run.model.model is None or shutil.which(command[0])):
            if answer.calibrate is not None:
                raise PlanError("--calibrate is for --model: a command after -- gets a plan")
            if (words := words_of_flags(command, run, dry)) is not None:
                run_again(context, [*own_words(context), *words])
                return
            with by_any_signal():
                variations = variations_of(
                    command, run, dry, foretells=bool(answer.search or answer.explain_change)
                )
                fits = _answer_for_command(variations, answer, as_json, command_of(context))
            raise typer.Exit(_EXIT_DOES_NOT_FIT if fits is False else 0)
        if run.model.model is None:
            raise PlanError(
                "name the model: --model with a config.json, its folder, or org/name; or give a"
                " command after --"
            )
        if dry.engine != "dry" and replace(dry, engine="auto") != DryOptions():
            raise PlanError(
                "--steps, --alone, --snapshot and --dry-env are for a command after --, or for"
                " --engine dry"
            )
        details, inputs = inputs_of(run, context.args)
        if answer.calibrate is not None:  # the context that was measured must not be used here
            inputs = replace(inputs, calibration=False)
        request = request_of(run.model.model, details, inputs)
        is_plan = not (answer.search or answer.explain_change or answer.calibrate)
        if takes_dry_cards(dry.engine, request, for_one_plan=is_plan):
            fits = _answer_on_dry_cards(request, run, answer, dry, as_json, command_of(context))
        elif answer.explain_change:
            fits = explain_changes(request, answer.explain_change, seconds, as_json)
        elif answer.search:
            fits = search_batches(request, answer.search_lengths, seconds, as_json)
        else:
            request = replace(request, proposes=True, command=command_of(context))
            fits = _show_plan(request, answer, seconds, as_json)
    except (PlanError, OSError) as error:
        print(f"trainer-plugins plan: {printable(error)}", file=sys.stderr)
        raise typer.Exit(_EXIT_BAD_INPUT) from error
    raise typer.Exit(_EXIT_DOES_NOT_FIT if fits is False else 0)


def _answer_on_dry_cards(
    request: "PlanRequest",
    run: RunOptions,
    answer: AnswerOptions,
    dry: DryOptions,
    as_json: bool,
    command: str,
) -> bool | None:
    """Print what was asked of a model; without a named engine, fake tensors help out."""
    from trainer_plugins.planner.plan import PlanError

    foretells = bool(answer.search or answer.explain_change)
    with by_any_signal(), as_command(request, run, dry, foretells=foretells) as variations:
        try:
            return _answer_for_command(variations, answer, as_json, command)
        except PlanError as error:
            if dry.engine == "dry":
                raise
            why = printable(error)
    print(f"planning: on fake tensors; on the dry card, {why}", file=sys.stderr)
    request = replace(request, proposes=True, command=command)
    return _show_plan(request, answer, run.machine.timeout, as_json)


def run_again(context: typer.Context, words: list[str]) -> None:
    """Run this command with the options that the flags of a pasted command mean."""
    with context.command.make_context(context.info_name, words, parent=context.parent) as again:
        context.command.invoke(again)


def command_of(context: typer.Context) -> str:
    """Return the command line that makes this plan again: all that differs from the defaults."""
    dashes = ["--"] if command_in(context.args) else []
    words = ["trainer-plugins", context.info_name or "", *own_words(context)]
    return shlex.join([*words, *dashes, *context.args])


def own_words(context: typer.Context) -> list[str]:
    """Return the options of this command that differ from the defaults, as words."""
    words: list[str] = []
    for parameter in context.command.params:
        value = context.params[parameter.name or ""]
        if value in (None, (), []) or value == parameter.get_default(context):
            continue
        flag = parameter.opts[0]
        if isinstance(value, bool):
            words.append(flag if value else parameter.secondary_opts[0])
            continue
        for each in value if isinstance(value, (list, tuple)) else [value]:
            words += [flag, str(each.value if isinstance(each, Enum) else each)]
    return words


def _refuse_contradictions(answer: AnswerOptions) -> None:
    """Refuse options that exclude each other, and places that cannot be written or read."""
    from trainer_plugins.planner.calibrate import timelines_of
    from trainer_plugins.planner.plan import PlanError

    html = answer.html
    if answer.search and answer.explain_change:
        raise PlanError("--search and --explain-change ask for different tables: give one")
    if answer.search_lengths is not None and not answer.search:
        raise PlanError("--search-lengths belongs to --search")
    if (answer.search or answer.explain_change) and (html or answer.calibrate):
        raise PlanError("--html and --calibrate are for one plan, not for a table of many")
    if html is not None and (html.is_dir() or not html.absolute().parent.is_dir()):
        raise PlanError(f"--html: {html} must be a file in a folder that exists")
    if answer.calibrate is not None:
        timelines_of(answer.calibrate)


def _answer_for_command(
    variations: "Variations", answer: AnswerOptions, as_json: bool, command: str
) -> bool | None:
    """Print what was asked of a command after --, and return whether it fits."""
    from trainer_plugins.cli.plan_search import show_changes, show_search
    from trainer_plugins.planner.compare.saved import changes_of

    if answer.explain_change:
        changes = changes_of(answer.explain_change)
        return show_changes(*variations.explained(changes), as_json)
    if answer.search:
        return show_search(variations.search, as_json)
    found = variations.proposals()
    _show(replace(found, planned={**found.planned, "command": command}), answer, as_json)
    return found.fits


def _show_plan(
    request: "PlanRequest", answer: AnswerOptions, timeout_seconds: float, as_json: bool
) -> bool | None:
    from trainer_plugins.planner.calibrate import calibrate
    from trainer_plugins.planner.predict import predict_one

    found = predict_one(request, timeout_seconds, partial(print, file=sys.stderr, flush=True))
    compared = None if answer.calibrate is None else calibrate(found, answer.calibrate)
    _show(found, answer, as_json, compared)
    return found.fits


def _show(
    found: "MemoryPlan",
    answer: AnswerOptions,
    as_json: bool,
    compared: "Calibration | None" = None,
) -> None:
    from trainer_plugins.report.html.plan_page import plan_page
    from trainer_plugins.report.page import show
    from trainer_plugins.report.plan_text import brief_report, plan_report
    from trainer_plugins.report.plans_text import calibration_report

    if answer.html is not None:
        answer.html.write_text(plan_page(found), encoding="utf-8")
    if as_json:
        more = {} if compared is None else {"calibration": compared}
        print_json("plan", found, **more)
        return
    show(plan_report(found) if answer.verbose else brief_report(found))
    if compared is not None:
        show(calibration_report(compared))


def _show_compared(a: Path, b: Path, as_json: bool) -> None:
    from trainer_plugins.planner.compare.beside import beside
    from trainer_plugins.report.page import show
    from trainer_plugins.report.plans_text import beside_report

    found = beside(a, b)
    if as_json:
        print_json("plan --compare", found)
    else:
        show(beside_report(found))
