"""Run any training script, unedited, with callbacks on every Trainer that it builds.

    python -m trainer_plugins.run --preset memory_safe --memory-warn-fraction 0.8 train.py --lr 1e-5
    python -m trainer_plugins.run -m package.module --lr 1e-5
    accelerate launch --num_processes 2 -m trainer_plugins.run train.py
    torchrun --nproc-per-node 2 -m trainer_plugins.run train.py

The script sees the same `sys.argv`, `sys.path` and `__main__` as under plain python, and its exit
code is passed on.
"""

import sys
from typing import Any

import click

from trainer_plugins.as_main import NoSuchProgramError, program
from trainer_plugins.plug_in.attachment import attach, say_at_exit
from trainer_plugins.plug_in.flags import argument, refuse, take_options
from trainer_plugins.plug_in.in_front import CommandInFront, select_given
from trainer_plugins.plug_in.options import MemoryArguments

_PROG = "python -m trainer_plugins.run"


@click.command(cls=CommandInFront)
@argument("command", nargs=-1, metavar="SCRIPT...", help="The script and its arguments.")
@take_options("memory", MemoryArguments)
@click.option("-m", "module", is_flag=True, help="Run a module instead of a script.")
def _run(**_: Any) -> None:
    """Run a training script, unedited, with callbacks on every transformers.Trainer it builds."""


def main(arguments: list[str]) -> None:
    """Attach the callbacks, then run the program that the command line names."""
    # Click only parses: it would catch some of the script's errors.
    try:
        params = _run.make_context(_PROG, arguments).params
    except click.exceptions.Exit as end:  # after --help
        sys.exit(end.exit_code)
    given, words = select_given(params), [*params["command"]]
    if not words:
        refuse(_PROG, "name a script, or a module after -m")
    try:
        run = program(words, params["module"])
    except NoSuchProgramError as error:
        refuse(_PROG, error)
    try:
        attach(**given)
    except ValueError as error:
        refuse(_PROG, error)
    say_at_exit()
    run()


if __name__ == "__main__":
    main(sys.argv[1:])
