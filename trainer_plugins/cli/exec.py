"""`trainer-plugins exec`: run any command, with callbacks on every Trainer built under it."""

import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from trainer_plugins import _site
from trainer_plugins.cli.exec_child import end_as, run_as_child
from trainer_plugins.cli.typed_options import take_vllm
from trainer_plugins.launch.environment import launch_environment
from trainer_plugins.planner.options import option, repeatable, switch
from trainer_plugins.plug_in.flags import argument, assign_variables, refuse, take_options
from trainer_plugins.plug_in.in_front import CommandInFront, select_given
from trainer_plugins.plug_in.options import DEFAULT_PRESET, MemoryArguments
from trainer_plugins.plug_in.reported import VARIABLE as MARKS
from trainer_plugins.plug_in.reported import describe_lack, folder_for_marks
from trainer_plugins.presets import preset
from trainer_plugins.printable import printable

_PROG = "trainer-plugins exec"
_ASK = "--fit-ask"
_DOES_NOT_FIT, _NOT_EXECUTABLE, _NOT_FOUND = 3, 126, 127


class ExecCommand(CommandInFront):
    """Parses `trainer-plugins exec`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # An option with an optional value would take the command's first word for it.
        ours = args.index("--") if "--" in args else len(args)
        ask = [_ASK if word == "--fit=ask" else word for word in args[:ours]]
        return super().parse_args(ctx, [*ask, *args[ours:]])


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Holds the cards for `--fit`, and the changes it may make."""

    gpu: str | None = option("", "With --fit: the GPU (default: the visible one with least free).")
    num_gpus: int | None = option("", "With --fit: the number of GPUs (default: all visible).")
    may: tuple[str, ...] = repeatable(
        "",
        "With --fit: what else may change: precision (bf16), optim (8-bit states), peft (LoRA"
        " instead of all weights), length (half of TRL's max_length).",
    )
    allow_writes: tuple[Path, ...] = repeatable(
        "", "With --fit: let its plans really write to this folder."
    )
    allow_network: bool = switch("", "With --fit: let its plans connect to other hosts.")


@click.command(cls=ExecCommand)
@argument("command", nargs=-1, metavar="-- COMMAND", help="The command to run.")
@take_options("memory", MemoryArguments)
@take_vllm
@click.option(
    "--fit",
    is_flag=True,
    help="Plan first, on cards that compute nothing. Change batch splitting and checkpointing until"
    " the run fits with the same result; then train under the preset survive.",
)
@click.option(
    _ASK, is_flag=True, help="Or --fit=ask: print the changes --fit would make, then exit."
)
@take_options("how", FitOptions)
def exec(
    command: tuple[str, ...],
    memory: MemoryArguments,
    vllm: bool,
    fit: bool,
    fit_ask: bool,
    how: FitOptions,
) -> None:
    """Run a command with callbacks on every Trainer under it.

    With a preset that has guards, it also sets the allocator settings of `trainer-plugins env`,
    unless you have set some, and prints a line about it. With --vllm, or TRL's --use_vllm in the
    command, it leaves out expandable segments. It sets nothing else except its hook.

    Example: trainer-plugins exec --preset survive -- accelerate launch train.py

    With --fit it plans the run first. Batch size, steps and schedule stay: SurviveOOM splits each
    micro-batch into pieces that fit. If nothing fits, it runs nothing and exits with code 3; with
    --preset survive it trains anyway, and splits the batches that fail. --fit=ask stops after its
    answer, with exit code 0 if it would run the command.

    It passes on signals and the exit code: 127 if the command is not found, 126 if it cannot be
    run. If no Trainer had callbacks, a line on stderr says so at the end.
    """
    given, words = select_given(vars(memory)), assign_variables(command)
    if not words:
        refuse(
            _PROG,
            "name a command after --, as in: trainer-plugins exec -- accelerate launch train.py",
        )
    anyway = "preset" in given  # the user chose how to train
    if fit or fit_ask:
        given = {"preset": "survive", **given}
    elif how != FitOptions():
        refuse(_PROG, "--gpu, --num-gpus, --may, --allow-writes and --allow-network need --fit")
    settings = _settings(given, with_vllm=vllm or _asks_for_vllm(words))
    if fit or fit_ask:
        from trainer_plugins.cli import exec_fit
        from trainer_plugins.planner.plan import PlanError

        answer = sys.stdout if fit_ask else sys.stderr
        try:
            options, changes = exec_fit.fit(words, given, settings, how, answer, anyway)
        except exec_fit.NothingFits as error:
            refuse(
                _PROG,
                f"--fit: {error}; nothing was started. To train anyway, and split micro-batches"
                " that run out of memory, add --preset survive",
                _DOES_NOT_FIT,
            )
        except PlanError as error:
            refuse(_PROG, f"--fit: {error}; nothing was started")
        given, settings = given | options, settings | changes
        if fit_ask:
            return
    path = os.environ.get("PYTHONPATH")
    theirs = [each for each in path.split(os.pathsep) if each not in _site.__path__] if path else []
    python_path = os.pathsep.join([*_site.__path__, *theirs])  # our hook first, and only once
    attached = {"TRAINER_PLUGINS_ATTACH": json.dumps(given), "PYTHONPATH": python_path}
    _run(words, os.environ | settings | attached)


def _run(words: list[str], environ: dict[str, str]) -> None:
    """Run the command, report at its end if no Trainer had callbacks, and exit as it did."""
    with folder_for_marks() as folder:
        try:
            code = run_as_child(words, environ | {MARKS: folder})
        except OSError as error:
            # As shells, env and timeout do: a launcher may check for these two.
            exit_code = _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
            refuse(_PROG, f"cannot run {words[0]}: {error.strerror}", exit_code)
        with suppress(OSError):  # the reader of a pipe may be gone
            if lack := describe_lack(folder):
                sys.stderr.write(f"{_PROG}: {lack}\n")
    end_as(code)


def _settings(given: dict[str, object], with_vllm: bool) -> dict[str, str]:
    """Return the allocator settings that are not set yet, and print them."""
    environment = launch_environment(os.environ, with_vllm)
    for finding in environment.findings:
        if finding.code == "extension-lock":
            print(f"{finding.severity.name} {finding}", file=sys.stderr)
    asked = preset(str(given.get("preset") or DEFAULT_PRESET))
    has_guards = not {*asked.callbacks} <= {*preset("observe").callbacks}
    changed = {
        export.name: export.value
        for export in (environment.exports if has_guards else ())
        if export.purpose == environment.allocator and os.environ.get(export.name) != export.value
    }
    if changed:
        assigned = " ".join(f"{name}={value}" for name, value in changed.items())
        line = f"trainer-plugins exec sets {assigned}: {environment.allocator}"
        print(printable(line), file=sys.stderr)
    return changed


def _asks_for_vllm(words: list[str]) -> bool:
    """Return whether a command has TRL's `--use_vllm` (colocated by default) and no server."""
    text = " ".join(words).lower().replace("-", "_").replace("=", " ")
    refused = ("use_vllm false", "vllm_mode server")
    return "use_vllm" in text and not any(each in text for each in refused)
