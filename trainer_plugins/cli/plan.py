"""`trainer-plugins plan`: predict the GPU memory of a run before you launch it."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path

import click
from rich.console import Group
from rich.text import Text

from trainer_plugins.cli.as_json import print_json
from trainer_plugins.cli.spelled import TYPED, WITH_OTHER_FLAGS, CommandOfARun
from trainer_plugins.cli.typed_options import refuse_bad_input
from trainer_plugins.drycuda.cuda_build import fetch
from trainer_plugins.drycuda.dry_run import DryRun, dry_run_of
from trainer_plugins.drycuda.dry_search import Variations
from trainer_plugins.drycuda.wall import Allowed
from trainer_plugins.interrupted import interrupt_by_any_signal
from trainer_plugins.planner.calibrate import add_measured_context, calibrate, timelines_of
from trainer_plugins.planner.cards import NO_CARD, card_of
from trainer_plugins.planner.compare.lines import Interrupted, SearchLine, all_of
from trainer_plugins.planner.compare.saved import ExplainedChanges, changes_of
from trainer_plugins.planner.inputs import request_of
from trainer_plugins.planner.options import (
    MOST_USED,
    RunOptions,
    complete,
    option,
    repeatable,
    switch,
)
from trainer_plugins.planner.plan import PlanError
from trainer_plugins.plug_in.flags import PanelOption, assign_variables, take_options
from trainer_plugins.report import plans_text
from trainer_plugins.report.page import show
from trainer_plugins.report.plan_text import brief_report, plan_report, verdict

_EXIT_DOES_NOT_FIT = 3

take_as_json = click.option(
    "--json", "as_json", cls=PanelOption, panel=MOST_USED, is_flag=True, help="Print JSON."
)

_OTHER = "Other answers"
_DRY_RUN = "Dry run, on cards that compute nothing"


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


@dataclass(frozen=True, kw_only=True)
class DryOptions:
    """Holds the settings for running a command that follows `--`."""

    steps: int | None = option(_DRY_RUN, "Optimizer steps to run (default: 2, for --model 3).")
    alone: bool = switch(
        _DRY_RUN, "Run rank 0 only, and assume that every other rank behaves like it."
    )
    snapshot: Path | None = option(
        _DRY_RUN, "Keep the allocator's snapshot in this file, which `explain` reads."
    )
    allow_writes: tuple[Path, ...] = repeatable(
        _DRY_RUN, "Let the command really write, rename and delete in this folder. Repeatable."
    )
    allow_network: bool = switch(_DRY_RUN, "Let the command connect to other hosts.")
    dry_env: bool = switch(
        _DRY_RUN, "If the installed torch is a CPU build, download its CUDA build into the cache."
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
        _refuse_contradictions(answer, dry)
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


def _refuse_contradictions(answer: AnswerOptions, dry: DryOptions) -> None:
    """Refuse mutually exclusive options, and paths that cannot be written or read."""
    if answer.search and answer.explain_change:
        raise PlanError("--search and --explain-change print different tables: choose one")
    if answer.search_lengths is not None and not answer.search:
        raise PlanError("--search-lengths needs --search")
    if (answer.search or answer.explain_change) and (answer.html or answer.calibrate):
        raise PlanError("--html and --calibrate need a single plan, not a table of many")
    for flag, file in (("--html", answer.html), ("--snapshot", dry.snapshot)):
        if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
            raise PlanError(f"{flag}: {file} must be a file in an existing folder")
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
            show(Group(verdict(plan), plans_text.changes_report(plan, saved)))
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
        show(plans_text.calibration_report(compared))
    return found.fits


def _show_search(variations: Sequence[Variations], as_json: bool) -> bool:
    """Print the lines of a search as they come, and return whether anything fits."""
    lines: list[SearchLine] = []

    def show_line(line: SearchLine) -> None:
        lines.append(line)
        tell(plans_text.line_in_words(line))

    try:
        result = all_of([each.search(show_line) for each in variations])
    except KeyboardInterrupt:
        if as_json:
            print_json("plan --search", Interrupted(lines=tuple(lines)))
        elif lines:
            show(Group(Text("Interrupted. Found so far:"), plans_text.lines_table(lines, None)))
        else:
            show(Text("Interrupted"))
        raise
    if as_json:
        print_json("plan --search", result)
    else:
        show(plans_text.search_report(result))
    return result.best is not None


def command_in(words: Sequence[str]) -> Sequence[str]:
    """Return the command after `--`; empty if there is none, or only flags."""
    return () if not words or words[0].startswith("-") else words


def variations_of_model(
    run: RunOptions, flags: Sequence[str], answer: AnswerOptions, options: DryOptions
) -> list[Variations]:
    """Return the dry runs of a model, one for each requested sequence length."""
    words = [word for flag in flags for word in flag.split("=", 1)]
    for flag, file in pairwise((*words, "FILE")):
        if flag == "--config":
            raise PlanError(
                "--config names a file of another program, which must be installed: plan that"
                f" program, as in -- axolotl train {file}, or -- llamafactory-cli train {file}"
            )
    if run.model is None:
        raise PlanError(
            "name a model: --model with a config.json, its folder, or org/name; or give a"
            " command after --"
        )
    run = complete(run, flags)
    if answer.calibrate is not None:  # otherwise it would use the context measured earlier
        run = replace(run, calibration=False)
    if answer.search and run.gpu is None:
        raise PlanError("--search needs a card for the run to fit on: name one with --gpu")
    if options.dry_env:
        fetch(tell)
    found = []
    lengths: list[int | None] = [*_lengths_in(answer.search_lengths)]
    for length in lengths or [run.seq_length]:
        request = request_of(run.model, replace(run, seq_length=length))
        asked = dry_run_of(request, run.timeout)
        asked = replace(
            asked, num_steps=options.steps or asked.num_steps, snapshot=options.snapshot
        )
        found.append(Variations(asked, tell))
    return found


def variations_of(
    command: Sequence[str], run: RunOptions, options: DryOptions, *, foretells: bool
) -> Variations:
    """Return the dry runs of a command, as it is and with other arguments.

    Raises:
        PlanError: an option repeats a setting of the command, or there is no answer.
    """
    _refuse_said_twice(run)
    card = card_of(run.gpu) if run.gpu is not None else NO_CARD
    if options.dry_env:
        fetch(tell)
    asked = DryRun(
        command=assign_variables(command),
        card=add_measured_context(card) if run.calibration else card,
        num_cards=run.num_gpus or 1,
        num_steps=options.steps or 2,
        alone=options.alone,
        timeout_seconds=run.timeout,
        snapshot=options.snapshot,
        foretells=foretells,
        allowed=Allowed(writes=options.allow_writes, network=options.allow_network),
    )
    return Variations(asked, tell)


def tell(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


_OF_A_MACHINE = {"gpu", "num_gpus", "calibration", "timeout"}


def _refuse_said_twice(run: RunOptions) -> None:
    """Refuse options for settings that the command itself has."""
    given = [
        f"--{each.name.replace('_', '-')}"
        for each in fields(run)
        if each.name not in _OF_A_MACHINE and getattr(run, each.name) != each.default
    ]
    if given:
        raise PlanError(f"{', '.join(given)}: a command after -- sets this itself")


def _lengths_in(text: str | None) -> list[int]:
    if text is None:
        return []
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise PlanError(f"--search-lengths needs numbers of tokens, as in 1024,2048, got {text!r}")
    return sorted({*map(int, parts)})
