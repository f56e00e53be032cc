"""The part of `trainer-plugins plan` that is for a command after `--`."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from trainer_plugins.cli.plan_options import RunOptions
from trainer_plugins.cli.typed_options import option

if TYPE_CHECKING:
    from trainer_plugins.testing.drycuda.dry_search import Variations


@dataclass(frozen=True, kw_only=True)
class DryOptions:
    """Says how to run a command that follows `--`."""

    panel: ClassVar[str] = "A command after --, run on cards that compute nothing"

    steps: int = option("Optimizer steps to run.", default=2)
    alone: bool = option(
        "Run rank 0 only; the ranks that are not there are taken to be like it.", default=False
    )
    snapshot: Path | None = option(
        "Keep the allocator's snapshot here: trainer-plugins explain reads it."
    )
    dry_env: bool = option(
        "Fetch torch's build for CUDA into the cache if the installed one is for CPUs.",
        default=False,
    )


def command_in(words: Sequence[str]) -> Sequence[str]:
    """Return the command that followed `--`; empty if there was none, or flags instead."""
    return () if not words or words[0].startswith("-") else words


def variations_of(
    command: Sequence[str], run: RunOptions, options: DryOptions, *, foretells: bool
) -> "Variations":
    """Return what runs the command on dry cards, as it is and with other arguments.

    Raises:
        PlanError: an option says what the command says itself, or there is no answer.
    """
    from trainer_plugins.planner.cards import card_of, with_measured_context
    from trainer_plugins.planner.plan import PlanError
    from trainer_plugins.testing.drycuda.cuda_build import DryCudaUnavailable, fetch
    from trainer_plugins.testing.drycuda.dry_plan import DryRun
    from trainer_plugins.testing.drycuda.dry_search import Variations

    tell = partial(print, file=sys.stderr, flush=True)
    machine = run.machine
    if machine.gpu is None:
        raise PlanError("name the card on which the command will run: --gpu")
    if given := [*_said_twice(run)]:
        raise PlanError(f"{', '.join(given)}: a command after -- says this itself")
    if options.snapshot is not None and not options.snapshot.absolute().parent.is_dir():
        raise PlanError(f"--snapshot: {options.snapshot} must be a file in a folder that exists")
    card = card_of(machine.gpu)
    try:
        if options.dry_env:
            fetch(tell)
    except DryCudaUnavailable as error:
        raise PlanError(str(error)) from error
    asked = DryRun(
        command=command,
        card=with_measured_context(card) if machine.calibration else card,
        num_cards=machine.num_gpus or 1,
        num_steps=options.steps,
        alone=options.alone,
        timeout_seconds=machine.timeout,
        snapshot=options.snapshot,
        foretells=foretells,
    )
    return Variations(asked, tell)


_OF_A_MACHINE = {"gpu", "num_gpus", "calibration", "timeout"}


def _said_twice(run: RunOptions) -> Iterator[str]:
    """Yield the options that describe what a command describes itself."""
    for group in (run.model, run.data, run.adapter, run.quantisation, run.machine):
        for each in fields(group):
            if each.name not in _OF_A_MACHINE and getattr(group, each.name) != each.default:
                yield f"--{each.name.replace('_', '-')}"
