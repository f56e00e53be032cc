"""The part of `trainer-plugins plan` that is for a command after `--`."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, ClassVar

from trainer_plugins.cli.plan_options import RunOptions
from trainer_plugins.cli.typed_options import option
from trainer_plugins.plug_in.flags import assigned

if TYPE_CHECKING:
    from trainer_plugins.drycuda.dry_search import Variations
    from trainer_plugins.planner.request import PlanRequest


@dataclass(frozen=True, kw_only=True)
class DryOptions:
    """Says how to run a command that follows `--`."""

    panel: ClassVar[str] = "A command after --, run on cards that compute nothing"

    steps: int | None = option("Optimizer steps to run (default: 2, for --model 3).")
    alone: bool = option(
        "Run rank 0 only; the ranks that are not there are taken to be like it.", default=False
    )
    snapshot: Path | None = option(
        "Keep the allocator's snapshot here: trainer-plugins explain reads it."
    )
    engine: str = option(
        "What answers for --model: fake, tensors without bytes; dry, such cards; auto, the cards"
        " where the installed torch is built for CUDA.",
        default="auto",
        metavar="NAME",
    )
    allow_writes: list[Path] | None = option(
        "Let the command write, rename and delete in this folder for real; may be repeated."
    )
    allow_network: bool = option("Let the command connect to other hosts.", default=False)
    dry_env: bool = option(
        "Fetch torch's build for CUDA into the cache if the installed one is for CPUs.",
        default=False,
    )


def command_in(words: Sequence[str]) -> Sequence[str]:
    """Return the command that followed `--`; empty if there was none, or flags instead."""
    return () if not words or words[0].startswith("-") else words


def words_of_flags(command: Sequence[str], run: RunOptions, dry: DryOptions) -> list[str] | None:
    """Return what a command's flags mean for `plan`; None where the command itself is to run.

    Without dry cards, and with `--engine fake`, they are read as far as they are known.
    """
    from trainer_plugins.drycuda.cuda_build import DryCudaUnavailable, site_with_cuda

    if dry.engine != "fake":
        try:
            if dry.engine == "dry" or dry.dry_env or site_with_cuda():
                return None
        except DryCudaUnavailable:
            pass
    from trainer_plugins.cli.foreign.pasted import read_command
    from trainer_plugins.cli.foreign.reading import tell

    _refuse_said_twice(run)
    reading = read_command(command)
    if reading is None:
        return None
    how = "" if dry.engine == "fake" else "; --dry-env runs it"
    tell(reading, f"read from the command's flags, it is not run{how}")
    if run.machine.num_gpus is not None:
        reading.options.pop("num_gpus", None)
    return reading.words()


def takes_dry_cards(engine: str, request: "PlanRequest", *, for_one_plan: bool) -> bool:
    """Return whether dry cards answer a request: where they can, unless told.

    Raises:
        PlanError: there is no engine of that name.
    """
    from trainer_plugins.drycuda.cuda_build import is_installed
    from trainer_plugins.drycuda.dry_cuda import unavailable_reason
    from trainer_plugins.drycuda.dry_request import why_not
    from trainer_plugins.planner.plan import PlanError

    if engine not in ("auto", "fake", "dry"):
        raise PlanError(f"--engine is auto, fake or dry, got {engine!r}")
    if engine == "auto":
        can = is_installed() and unavailable_reason() is None
        return can and for_one_plan and not why_not(request)
    return engine == "dry"


@contextmanager
def as_command(
    request: "PlanRequest", run: RunOptions, options: DryOptions, *, foretells: bool
) -> Iterator["Variations"]:
    """Let a request be run on dry cards as a command is; it is in a file meanwhile."""
    from trainer_plugins.drycuda.dry_request import dry_run_of
    from trainer_plugins.drycuda.dry_search import Variations

    tell = _prepared(options)
    with TemporaryDirectory(prefix="trainer-plugins-plan-") as folder:
        asked = dry_run_of(request, Path(folder) / "request", run.machine.timeout)
        asked = replace(
            asked,
            num_steps=options.steps or asked.num_steps,
            snapshot=options.snapshot,
            foretells=foretells,
        )
        yield Variations(asked, tell)


def variations_of(
    command: Sequence[str], run: RunOptions, options: DryOptions, *, foretells: bool
) -> "Variations":
    """Return what runs the command on dry cards, as it is and with other arguments.

    Raises:
        PlanError: an option says what the command says itself, or there is no answer.
    """
    from trainer_plugins.drycuda.dry_run import DryRun
    from trainer_plugins.drycuda.dry_search import Variations
    from trainer_plugins.drycuda.wall import Allowed
    from trainer_plugins.planner.calibrate import with_measured_context
    from trainer_plugins.planner.cards import card_of
    from trainer_plugins.planner.plan import PlanError

    machine = run.machine
    if machine.gpu is None:
        raise PlanError("name the card on which the command will run: --gpu")
    if options.engine == "fake":
        raise PlanError("--engine fake reads a command's flags, and these name no model")
    _refuse_said_twice(run)
    card = card_of(machine.gpu)
    tell = _prepared(options)
    asked = DryRun(
        command=assigned(command),
        card=with_measured_context(card) if machine.calibration else card,
        num_cards=machine.num_gpus or 1,
        num_steps=options.steps or 2,
        alone=options.alone,
        timeout_seconds=machine.timeout,
        snapshot=options.snapshot,
        foretells=foretells,
        allowed=Allowed(writes=tuple(options.allow_writes or ()), network=options.allow_network),
    )
    return Variations(asked, tell)


def _prepared(options: DryOptions) -> Callable[[str], None]:
    """Look whether a snapshot can be kept, and fetch torch if asked; return what tells of it."""
    from trainer_plugins.drycuda.cuda_build import DryCudaUnavailable, fetch
    from trainer_plugins.planner.plan import PlanError

    tell = partial(print, file=sys.stderr, flush=True)
    if options.snapshot is not None and not options.snapshot.absolute().parent.is_dir():
        raise PlanError(f"--snapshot: {options.snapshot} must be a file in a folder that exists")
    try:
        if options.dry_env:
            fetch(tell)
    except DryCudaUnavailable as error:
        raise PlanError(str(error)) from error
    return tell


_OF_A_MACHINE = {"gpu", "num_gpus", "calibration", "timeout"}


def _refuse_said_twice(run: RunOptions) -> None:
    """Refuse the options that describe what a command describes itself."""
    from trainer_plugins.planner.plan import PlanError

    given = [
        f"--{each.name.replace('_', '-')}"
        for group in (run.model, run.data, run.adapter, run.quantisation, run.machine)
        for each in fields(group)
        if each.name not in _OF_A_MACHINE and getattr(group, each.name) != each.default
    ]
    if given:
        raise PlanError(f"{', '.join(given)}: a command after -- says this itself")
