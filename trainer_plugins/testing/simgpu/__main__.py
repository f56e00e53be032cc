"""Run any script on a simulated accelerator, unedited.

    python -m trainer_plugins.testing.simgpu --capacity 2GiB train.py --lr 1e-5
    python -m trainer_plugins.testing.simgpu --capacity 2GiB -m package.module --lr 1e-5
    torchrun --nproc-per-node 2 -m trainer_plugins.testing.simgpu --capacity 2GiB train.py

The script sees the same `sys.argv`, `sys.path` and `__main__` as under plain python, and its exit
code is passed on.
"""

import os
import sys
from typing import Any, NoReturn

import click

from trainer_plugins.as_main import NoSuchProgramError, program
from trainer_plugins.testing import simgpu
from trainer_plugins.units import parse_size

_SETTINGS = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}


@click.command(context_settings=_SETTINGS)
@click.option(
    "--capacity",
    metavar="SIZE",
    help="Memory of the card, such as 2GiB; an existing card needs none.",
)
@click.option("--card", metavar="PATH", help="A card file to share with other processes.")
@click.option("-m", "module", is_flag=True, help="Run a module instead of a script.")
@click.argument("command", nargs=-1, metavar="SCRIPT...")
def _run(**_: Any) -> None:
    """Run a script on a simulated accelerator in host memory."""


def main(arguments: list[str]) -> None:
    """Enable simgpu, then run the program that the command line names."""
    try:
        # Click only parses: it would catch some of the script's errors.
        asked = _run.make_context("python -m trainer_plugins.testing.simgpu", arguments).params
        if not asked["command"]:
            raise ValueError("name a script, or a module after -m")
        if asked["card"]:
            os.environ["SIMGPU_CARD"] = asked["card"]  # the first process to need it creates it
        simgpu.enable(parse_size(asked["capacity"]) if asked["capacity"] else None)
    except click.exceptions.Exit as end:  # after --help
        sys.exit(end.exit_code)
    except click.UsageError as error:
        _refuse(error.format_message())
    except (ValueError, OSError, simgpu.SimgpuUnavailable) as error:
        _refuse(str(error))
    try:
        run = program([*asked["command"]], asked["module"])
    except NoSuchProgramError as error:
        _refuse(str(error))
    run()


def _refuse(reason: str) -> NoReturn:
    sys.stderr.write(f"simgpu: {reason}\n")
    sys.exit(2)  # as for any wrong command line


if __name__ == "__main__":
    main(sys.argv[1:])
