"""Run any script on a simulated accelerator, unedited.

    python -m trainer_plugins.testing.simgpu --capacity 2GiB train.py --lr 1e-5
    python -m trainer_plugins.testing.simgpu --capacity 2GiB -m package.module --lr 1e-5
    torchrun --nproc-per-node 2 -m trainer_plugins.testing.simgpu --capacity 2GiB train.py

The script sees the same `sys.argv`, `sys.path` and `__main__` as under plain python, and its exit
code is passed on.
"""

import argparse
import os
import sys

from trainer_plugins.as_main import NoSuchProgramError, program
from trainer_plugins.units import parse_size

_EXIT_USAGE = 2


def main(arguments: list[str]) -> None:
    """Enable simgpu, then run the program that the command line names."""
    options = _parse(arguments)
    from trainer_plugins.testing import simgpu

    try:
        if options.card:
            os.environ["SIMGPU_CARD"] = options.card  # the first process to need it creates it
        simgpu.enable(options.capacity)
    except (ValueError, OSError, simgpu.SimgpuUnavailable) as error:
        _refuse(str(error))
    try:
        run = program(options.command, options.module)
    except NoSuchProgramError as error:
        _refuse(str(error))
    run()


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m trainer_plugins.testing.simgpu",
        usage="%(prog)s --capacity SIZE [--card PATH] (SCRIPT | -m MODULE) [ARGUMENT ...]",
        description="Run a script on a simulated accelerator in host memory.",
    )
    parser.add_argument(
        "--capacity",
        metavar="SIZE",
        help="memory of the card, such as 2GiB; not needed for an existing card",
    )
    parser.add_argument("--card", metavar="PATH", help="a card file to share with other processes")
    parser.add_argument("-m", dest="module", action="store_true", help="the command is a module")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments[1:] if arguments[:1] == ["--"] else arguments)
    if options.command[:1] == ["--"]:
        del options.command[0]
    if not options.command:
        _refuse("name a script, or a module after -m")
    if options.capacity is not None:
        try:
            options.capacity = parse_size(options.capacity)
        except ValueError as error:
            _refuse(f"--capacity: {error}")
    return options


def _refuse(reason: str) -> None:
    sys.stderr.write(f"simgpu: {reason}\n")
    sys.exit(_EXIT_USAGE)


if __name__ == "__main__":
    main(sys.argv[1:])
