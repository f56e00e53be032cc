"""`trainer-plugins exec`: run any command, with callbacks on every Trainer built under it."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from trainer_plugins.cli.typed_options import Vllm
from trainer_plugins.interrupted import by_any_signal
from trainer_plugins.planner.calibrate import with_measured_context
from trainer_plugins.planner.cards import Card, card_of, of_size
from trainer_plugins.planner.plan import PlanError, Proposal
from trainer_plugins.plug_in.fitted import VARIABLE as CHANGES
from trainer_plugins.plug_in.flags import CommandInFront, assigned, with_options
from trainer_plugins.plug_in.options import DEFAULT_PRESET, MemoryArguments, memory_arguments
from trainer_plugins.plug_in.reported import VARIABLE as MARKS
from trainer_plugins.plug_in.reported import describe_lack, folder_for_marks
from trainer_plugins.presets import preset
from trainer_plugins.printable import printable
from trainer_plugins.units import size

if TYPE_CHECKING:
    from trainer_plugins.drycuda.dry_run import DryRun
    from trainer_plugins.drycuda.wall import Allowed

MAY = ("precision", "optim", "peft", "length")
"""What a user may allow to be changed besides how the same result is computed."""

_VOUCHES = "TRAINER_PLUGINS_DRY_VOUCHES"  # of inside/batches.py, which imports torch
_ASK = "--fit-ask"
_OF_FIT = ("--gpu", "--num-gpus", "--may", "--allow-writes", "--allow-network")
_DOES_NOT_FIT, _NOT_EXECUTABLE, _NOT_FOUND = 3, 126, 127


class ExecCommand(CommandInFront):
    """Parses `trainer-plugins exec`."""

    prog = "trainer-plugins exec"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # An option that takes a value or none would take the command's first word for one.
        ours = args.index("--") if "--" in args else len(args)
        ask = [_ASK if word == "--fit=ask" else word for word in args[:ours]]
        return super().parse_args(ctx, [*ask, *args[ours:]])


@with_options()
def exec_(
    memory: MemoryArguments,
    vllm: Vllm = False,
    fit: Annotated[
        bool,
        typer.Option(
            "--fit",
            help="Plan first, on cards that compute nothing; change how rows are divided and what"
            " is kept, so that it fits with the same result; then train under the preset survive.",
        ),
    ] = False,
    fit_ask: Annotated[
        bool,
        typer.Option(_ASK, help="Or --fit=ask: say what --fit would do, and stop; run nothing."),
    ] = False,
    gpu: Annotated[
        str | None, typer.Option(help="With --fit: the card (default: the fullest visible).")
    ] = None,
    num_gpus: Annotated[
        int | None, typer.Option(help="With --fit: how many cards (default: all visible).")
    ] = None,
    may: Annotated[
        list[str] | None,
        typer.Option(
            help="With --fit: what may change besides: precision (bf16), optim (8-bit states),"
            " peft (LoRA instead of all weights), length (half of TRL's max_length)."
        ),
    ] = None,
    allow_writes: Annotated[
        list[Path] | None,
        typer.Option(help="With --fit: let its plans write in this folder for real."),
    ] = None,
    allow_network: Annotated[
        bool,
        typer.Option("--allow-network", help="With --fit: let its plans connect to other hosts."),
    ] = False,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND", help="The command to run.")
    ] = None,
) -> None:
    """Run a command with callbacks on every Trainer under it.

    A preset with guards also sets the allocator settings of `trainer-plugins env`, unless you have
    set some, and prints a line about it. With --vllm, or TRL's --use_vllm in the command, these
    leave out expandable segments. Nothing else is set except the hook.

    Example: trainer-plugins exec --preset survive -- accelerate launch train.py

    With --fit it is planned first. Batch size, steps and schedule stay: SurviveOOM divides each
    micro-batch into what fits. Where nothing fits, nothing is run, and the exit code is 3; with
    --preset survive it trains anyway, and is divided where it fails. --fit=ask stops after its
    answer, with exit code 0 if it would run the command.

    Signals and the exit code are passed on: 127 if the command is not found, 126 if it cannot be
    run. If no Trainer under it had callbacks, a line on stderr says so in the end.
    """
    given, words = ExecCommand.given(vars(memory)), assigned(command or ())
    if not words:
        ExecCommand.refuse(
            "name a command after --, as in: trainer-plugins exec -- accelerate launch train.py"
        )
    anyway = "preset" in given  # the user has said how to train
    if fit or fit_ask:
        given = {"preset": "survive", **given}
    elif gpu or num_gpus or may or allow_writes or allow_network:
        ExecCommand.refuse(f"{', '.join(_OF_FIT[:-1])} and {_OF_FIT[-1]} are for --fit")
    settings = _settings(given, with_vllm=vllm or _asks_for_vllm(words))
    if fit or fit_ask:
        from trainer_plugins.drycuda.wall import Allowed

        allowed = Allowed(writes=tuple(allow_writes or ()), network=allow_network)
        answer = sys.stdout if fit_ask else sys.stderr
        try:
            asked = _run_to_plan(words, given, settings, _cards(gpu, num_gpus), allowed)
            options, changes = _fitted(asked, given, may or (), answer, anyway)
        except PlanError as error:
            ExecCommand.refuse(f"--fit: {error}; nothing was started")
        given, settings = given | options, settings | changes
        if fit_ask:
            return
    attached = {"TRAINER_PLUGINS_ATTACH": json.dumps(given), "PYTHONPATH": _python_path()}
    _run(words, os.environ | settings | attached)


def _run(words: list[str], environ: dict[str, str]) -> None:
    """Run the command, say at its end if no Trainer had callbacks, and end as it did."""
    from trainer_plugins.cli.exec_child import end_as, run_as_child

    with folder_for_marks() as folder:
        try:
            code = run_as_child(words, environ | {MARKS: folder})
        except OSError as error:
            # As shells, env and timeout do: a launcher may check for these two.
            exit_code = _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
            ExecCommand.refuse(f"cannot run {words[0]}: {error.strerror}", exit_code)
        with suppress(OSError):  # the reader of a pipe may be gone
            if lack := describe_lack(folder):
                sys.stderr.write(f"{ExecCommand.prog}: {lack}\n")
    end_as(code)


def _settings(given: dict[str, object], with_vllm: bool) -> dict[str, str]:
    """Return the allocator settings that are not there yet, and say them."""
    from trainer_plugins.launch.environment import launch_environment

    environment = launch_environment(os.environ, with_vllm)
    for finding in environment.findings:
        if finding.code == "extension-lock":
            print(f"{finding.severity.name} {finding}", file=sys.stderr)
    changed = {
        export.name: export.value
        for export in (environment.exports if _has_guards(given) else ())
        if export.purpose == environment.allocator and os.environ.get(export.name) != export.value
    }
    if changed:
        assigned = " ".join(f"{name}={value}" for name, value in changed.items())
        line = f"trainer-plugins exec sets {assigned}: {environment.allocator}"
        print(printable(line), file=sys.stderr)
    return changed


def _python_path() -> str:
    """Return PYTHONPATH with the folder of our hook in front, which an exec put there once."""
    from trainer_plugins import _site

    path = os.environ.get("PYTHONPATH")
    theirs = [each for each in path.split(os.pathsep) if each not in _site.__path__] if path else []
    return os.pathsep.join([*_site.__path__, *theirs])


def _run_to_plan(
    words: Sequence[str],
    given: Mapping[str, Any],
    settings: Mapping[str, str],
    cards: tuple[Card, int],
    allowed: "Allowed",
) -> "DryRun":
    """Return the command on dry cards, with the allocator settings that it will get.

    Raises:
        PlanError: the preset has no SurviveOOM, which is to divide what does not fit.
    """
    from trainer_plugins.drycuda.dry_run import DryRun

    try:
        memory_arguments(**{**given, "rows_at_once": 1})
    except ValueError as error:
        raise PlanError(str(error)) from error
    card, number = cards
    vouches = {_VOUCHES: "1"} if given.get("vouch_for_loss") else {}
    return DryRun(
        command=words,
        card=card,
        num_cards=number,
        environment={**settings, **vouches},
        foretells=True,
        allowed=allowed,
    )


def _fitted(
    asked: "DryRun", given: Mapping[str, Any], may: Sequence[str], answer: TextIO, anyway: bool
) -> tuple[dict[str, object], dict[str, str]]:
    """Plan the command; return options of the callbacks and variables with which it fits.

    Where nothing fits this ends, with exit code 3, or trains `anyway` as `given`. The choice is
    printed to `answer`, and what is being done to standard error.

    Raises:
        PlanError: there is no plan of this command, or `may` is not of `MAY`.
    """
    from trainer_plugins.drycuda.dry_search import Variations

    if unknown := {*may} - {*MAY}:
        raise PlanError(
            f"--may is {', '.join(MAY[:-1])} or {MAY[-1]}, got {', '.join(sorted(unknown))}"
        )
    say = partial(print, "trainer-plugins exec --fit:", file=answer, flush=True)
    with by_any_signal():
        variations = Variations(asked, partial(print, file=sys.stderr, flush=True))
        if variations.fits:
            spare = size(variations.plan.margin_bytes or 0)
            say(f"it fits as it is, {spare} to spare")
            return {}, {}
        found, failed = variations.first_that_fits(may)
    if found is None:
        why = f"nothing fits that keeps the result: {'; '.join(failed)}"
        if not anyway:
            ExecCommand.refuse(
                f"--fit: {why}; nothing was started. To train anyway, and divide what runs out of"
                " memory, add --preset survive",
                _DOES_NOT_FIT,
            )
        say(printable(f"{why}; it trains under the preset {given['preset']}"))
        return {}, {}
    options: dict[str, object] = {}
    if found.rows_at_once:
        options["rows_at_once"] = found.rows_at_once
    if found.vouches:
        options["vouch_for_loss"] = True
    for line in _lines_of(found.proposal, {"preset": given["preset"]} | options):
        say(printable(line))
    changes = json.dumps({"planned": found.planned, "changed": found.changed})
    return options, {CHANGES: changes} if found.changed else {}


def _lines_of(proposal: Proposal, options: Mapping[str, Any]) -> Iterator[str]:
    """Say what is changed, what it costs, and what to type to have it without a plan."""
    words = f"{', '.join(proposal.changes)}: {size(proposal.margin_bytes)} to spare"
    yield f"{words}. Price: {proposal.price}"
    typed = f"exec --preset {options['preset']}"
    if "rows_at_once" in options:
        typed += f" --memory-rows-at-once {options['rows_at_once']}"
    if "vouch_for_loss" in options:
        typed += " --memory-vouch-for-loss"
    typed = f"{typed} -- COMMAND {proposal.flags}".rstrip()
    yield f"without a plan, type: trainer-plugins {typed}"


def _cards(gpu: str | None, num_gpus: int | None) -> tuple[Card, int]:
    """Return the card that is named, or the visible one with the least memory free; and how many.

    Raises:
        PlanError: no card is named, and none is visible.
    """
    from trainer_plugins.check.gather_here import gather_here
    from trainer_plugins.check.machine import cards_in_use

    facts = gather_here(os.environ)
    found = [
        replace(
            of_size(each.name, each.reading.total_bytes),
            capacity_bytes=each.reading.free_bytes,
            capability=each.capability or (9, 0),
            guess="",
        )
        for each in cards_in_use(facts)
        if each.reading is not None
    ]
    number = num_gpus or max(1, len(found))
    if gpu is not None:
        return with_measured_context(card_of(gpu)), number
    if not found:
        why = facts.driver_trouble or facts.no_cards or "no card is visible"
        raise PlanError(f"name the card with --gpu: {why}")
    return with_measured_context(min(found, key=lambda card: card.capacity_bytes)), number


def _has_guards(given: dict[str, object]) -> bool:
    """Return whether the preset does more than observe, which changes nothing."""
    asked = preset(str(given.get("preset") or DEFAULT_PRESET))
    return not {*asked.callbacks} <= {*preset("observe").callbacks}


def _asks_for_vllm(words: list[str]) -> bool:
    """Return whether a command has TRL's `--use_vllm`, by default colocated, and no vLLM server."""
    text = " ".join(words).lower().replace("-", "_").replace("=", " ")
    refused = ("use_vllm false", "vllm_mode server")
    return "use_vllm" in text and not any(each in text for each in refused)
