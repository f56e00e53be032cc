"""Run any training script, unedited, with callbacks on every Trainer that it builds.

    python -m trainer_plugins.run --preset memory_safe --memory-warn-fraction 0.8 train.py --lr 1e-5
    python -m trainer_plugins.run -m package.module --lr 1e-5
    accelerate launch --num_processes 2 -m trainer_plugins.run train.py
    torchrun --nproc-per-node 2 -m trainer_plugins.run train.py

The script sees the same `sys.argv`, `sys.path` and `__main__` as under plain python, and its exit
code is passed on.
"""

import sys
from typing import Annotated, Any

import typer

from trainer_plugins.as_main import NoSuchProgramError, program
from trainer_plugins.plug_in.attachment import attach, say_at_exit
from trainer_plugins.plug_in.flags import (
    BEFORE_A_COMMAND,
    PRESETS_IN_WORDS,
    CommandInFront,
    take_options,
)
from trainer_plugins.plug_in.options import MemoryArguments


class RunCommand(CommandInFront):
    """Parses `python -m trainer_plugins.run`."""

    prog = "python -m trainer_plugins.run"


@take_options()
def _run(
    memory: MemoryArguments,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="SCRIPT", help="The script and its arguments.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="Run a module instead of a script.")] = False,
) -> None:
    """Run a training script, unedited, with callbacks on every transformers.Trainer it builds."""


def main(arguments: list[str]) -> None:
    """Attach the callbacks, then run the program that the command line names."""
    app = typer.Typer(add_completion=False)
    app.command(cls=RunCommand, context_settings=BEFORE_A_COMMAND, epilog=PRESETS_IN_WORDS)(_run)
    # Typer only parses: it would catch some of the script's errors, and change excepthook.
    command: Any = typer.main.get_command(app)
    try:
        params = command.make_context(RunCommand.prog, arguments).params
    except typer.Exit as end:  # after --help
        sys.exit(end.exit_code)
    given, words = RunCommand.select_given(params), list(params["command"] or ())
    if not words:
        RunCommand.refuse("name a script, or a module after -m")
    try:
        run = program(words, params["module"])
    except NoSuchProgramError as error:
        RunCommand.refuse(str(error))
    try:
        attach(**given)
    except ValueError as error:
        RunCommand.refuse(str(error))
    say_at_exit()
    run()


if __name__ == "__main__":
    main(sys.argv[1:])
