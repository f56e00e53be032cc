"""Turn the words of `trainer-plugins plan` into runs on cards that compute nothing."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_plugins.drycuda.cuda_build import fetch
from trainer_plugins.drycuda.dry_run import DryRun, dry_run_of
from trainer_plugins.drycuda.dry_search import Variations
from trainer_plugins.drycuda.wall import Allowed
from trainer_plugins.planner.calibrate import add_measured_context
from trainer_plugins.planner.cards import NO_CARD, card_of
from trainer_plugins.planner.inputs import request_of
from trainer_plugins.planner.options import RunOptions, complete, option, repeatable, switch
from trainer_plugins.planner.plan import PlanError
from trainer_plugins.plug_in.flags import assign_variables

if TYPE_CHECKING:
    from trainer_plugins.cli.plan import AnswerOptions

_DRY_RUN = "Dry run, on cards that compute nothing"


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


def command_in(words: Sequence[str]) -> Sequence[str]:
    """Return the command after `--`; empty if there is none, or only flags."""
    return () if not words or words[0].startswith("-") else words


def variations_of_model(
    run: RunOptions, flags: Sequence[str], answer: "AnswerOptions", options: DryOptions
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
    _prepare(options)
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
    _prepare(options)
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


def _prepare(options: DryOptions) -> None:
    """Check that a snapshot can be kept, and fetch torch if asked."""
    if options.snapshot is not None and not options.snapshot.absolute().parent.is_dir():
        raise PlanError(f"--snapshot: {options.snapshot} must be a file in an existing folder")
    if options.dry_env:
        fetch(tell)


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
