"""`trainer-plugins plan`: predict the GPU memory of a run before you launch it."""

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
from rich.console import Group
from rich.text import Text

from trainer_plugins.cli.as_json import print_json
from trainer_plugins.cli.plan_dry import (
    DryOptions,
    command_in,
    tell,
    variations_of,
    variations_of_model,
)
from trainer_plugins.cli.spelled import TYPED, WITH_OTHER_FLAGS, CommandOfARun
from trainer_plugins.cli.typed_options import refuse_bad_input
from trainer_plugins.drycuda.cuda_build import fetch
from trainer_plugins.drycuda.dry_search import Variations
from trainer_plugins.interrupted import interrupt_by_any_signal
from trainer_plugins.planner.calibrate import calibrate, timelines_of
from trainer_plugins.planner.compare.lines import Interrupted, SearchLine, all_of
from trainer_plugins.planner.compare.saved import ExplainedChanges, changes_of
from trainer_plugins.planner.options import MOST_USED, RunOptions, option, repeatable, switch
from trainer_plugins.planner.plan import PlanError
from trainer_plugins.plug_in.flags import PanelOption, take_options
from trainer_plugins.report.page import show
from trainer_plugins.report.plan_text import brief_report, plan_report, verdict
from trainer_plugins.report.plans_text import (
    calibration_report,
    changes_report,
    line_in_words,
    lines_table,
    search_report,
)

_EXIT_DOES_NOT_FIT = 3

take_as_json = click.option(
    "--json", "as_json", cls=PanelOption, panel=MOST_USED, is_flag=True, help="Print JSON."
)

_OTHER = "Other answers"


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """Holds the options for output other than a plan in the terminal."""

    search: bool = switch(
        MOST_USED, "Find the largest micro-batch that fits, at the same effective batch size."
    )
    verbose: bool = switch(
        MOST_USED, "Print everything: figures, tensors, assumptions and changes."
    )
    html: Path | None = option(MOST_USED, "Write an HTML page of the plan to this file.")
    search_lengths: str | None = option(
        _OTHER,
        "With --search and --model: row lengths to try, as in 1024,2048 (default: --seq-length).",
    )
    explain_change: tuple[str, ...] = repeatable(
        _OTHER,
        "Predict the saving of a change: a name, several joined by +, or all. Repeatable.",
        metavar="SWITCH",
    )
    calibrate: Path | None = option(
        _OTHER, "Compare with the real run in this output_dir, and store its context size."
    )


@click.command(cls=CommandOfARun, context_settings=WITH_OTHER_FLAGS)
@click.pass_context
@take_options("run", RunOptions)
@take_options("answer", AnswerOptions)
@take_options("dry", DryOptions)
@take_as_json
def plan(
    context: click.Context, run: RunOptions, answer: AnswerOptions, dry: DryOptions, as_json: bool
) -> None:
    """Predict a run's peak memory without a GPU. You can add all flags of TrainingArguments.

    Example: trainer-plugins plan --model config.json --gpu 24GiB --per_device_train_batch_size 4

    Or run your own command on CUDA cards that compute nothing:

    trainer-plugins plan --gpu 24GiB -- python train.py --learning_rate 1e-5

    Exit codes: 0 it fits, or no card was named; 3 it does not; 2 the input cannot be predicted.
    """
    with refuse_bad_input(PlanError):
        _refuse_contradictions(answer)
        command = command_in(context.args)
        if dry.dry_env and not command and run.model is None:
            print(f"torch's CUDA build is in {fetch(tell)}")
            return
        # With --model, a stray word that is not a program is a typo.
        is_command = bool(command) and (run.model is None or bool(shutil.which(command[0])))
        with interrupt_by_any_signal():
            if is_command:
                foretells = bool(answer.search or answer.explain_change)
                variations = [variations_of(command, run, dry, foretells=foretells)]
            else:
                variations = variations_of_model(run, context.args, answer, dry)
            words = shlex.join(["trainer-plugins", "plan", *context.meta[TYPED]])
            fits = _answer(variations, answer, as_json, words)
    raise SystemExit(_EXIT_DOES_NOT_FIT if fits is False else 0)


def _refuse_contradictions(answer: AnswerOptions) -> None:
    """Refuse mutually exclusive options, and paths that cannot be written or read."""
    html = answer.html
    if answer.search and answer.explain_change:
        raise PlanError("--search and --explain-change print different tables: choose one")
    if answer.search_lengths is not None and not answer.search:
        raise PlanError("--search-lengths needs --search")
    if (answer.search or answer.explain_change) and (html or answer.calibrate):
        raise PlanError("--html and --calibrate need a single plan, not a table of many")
    if html is not None and (html.is_dir() or not html.absolute().parent.is_dir()):
        raise PlanError(f"--html: {html} must be a file in an existing folder")
    if answer.calibrate is not None:
        timelines_of(answer.calibrate)


def _answer(
    variations: list[Variations], answer: AnswerOptions, as_json: bool, command: str
) -> bool | None:
    """Print the answer for a command or a model, and return whether it fits."""
    if answer.explain_change:
        plan, saved = variations[0].explain_changes(changes_of(answer.explain_change))
        if as_json:
            print_json("plan --explain-change", ExplainedChanges(plan=plan, changes=saved))
        else:
            show(Group(verdict(plan), changes_report(plan, saved)))
        return plan.fits
    if answer.search:
        return _show_search(variations, as_json)
    found = variations[0].proposals() if answer.calibrate is None else variations[0].plan
    compared = None if answer.calibrate is None else calibrate(found, answer.calibrate)
    found = replace(found, planned={**found.planned, "command": command})
    if answer.html is not None:
        from trainer_plugins.report.html.plan_page import plan_page

        answer.html.write_text(plan_page(found), encoding="utf-8")
    if as_json:
        print_json("plan", found, **({} if compared is None else {"calibration": compared}))
        return found.fits
    show(plan_report(found) if answer.verbose else brief_report(found))
    if compared is not None:
        show(calibration_report(compared))
    return found.fits


def _show_search(variations: Sequence[Variations], as_json: bool) -> bool:
    """Print the lines of a search as they come, and return whether anything fits."""
    lines: list[SearchLine] = []

    def show_line(line: SearchLine) -> None:
        lines.append(line)
        tell(line_in_words(line))

    try:
        result = all_of([each.search(show_line) for each in variations])
    except KeyboardInterrupt:
        if as_json:
            print_json("plan --search", Interrupted(lines=tuple(lines)))
        elif lines:
            show(Group(Text("Interrupted. Found so far:"), lines_table(lines, None)))
        else:
            show(Text("Interrupted"))
        raise
    if as_json:
        print_json("plan --search", result)
    else:
        show(search_report(result))
    return result.best is not None
