"""Run any script on a dry card, unedited.

    python -m trainer_plugins.drycuda --gpu a100-80gb train.py --lr 1e-5
    python -m trainer_plugins.drycuda --gpu a100-80gb -m pytest tests
    python -m trainer_plugins.drycuda --gpu 24GiB --num-gpus 2 -- torchrun ... train.py

The exit code is the script's. The script can read your files but changes none: `--allow-writes
PATH` names a folder that it may change, and `--allow-network` lets it reach other hosts. With
`--numbers` it really trains, and its files are really written.
"""

import argparse
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from trainer_plugins.drycuda.dry_cuda import DryCuda
from trainer_plugins.drycuda.wall import Allowed
from trainer_plugins.interrupted import interrupt_by_any_signal
from trainer_plugins.planner.cards import card_of

_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer_plugins.drycuda",
        usage="%(prog)s --gpu CARD [--num-gpus N] [--alone] [--numbers] [--allow-writes PATH]"
        " [--allow-network] (SCRIPT | -m MODULE | -- COMMAND) ...",
        description="Run a command on CUDA cards that compute nothing.",
    )
    parser.add_argument("--gpu", default="h100-80gb", help="a GPU name, or its memory size")
    parser.add_argument("--num-gpus", type=int, default=1, help="number of GPUs")
    parser.add_argument("--alone", action="store_true", help="run rank 0 only")
    parser.add_argument("--numbers", action="store_true", help="compute every operator on the CPU")
    parser.add_argument(
        "--allow-writes",
        action="append",
        type=Path,
        default=[],
        help="let it really change this path",
    )
    parser.add_argument("--allow-network", action="store_true", help="let it reach other hosts")
    parser.add_argument("-m", nargs=argparse.REMAINDER, dest="module", help="run a module")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if options.module:
        command = [sys.executable, "-m", *options.module]
    if not command:
        parser.error("name a script, a module after -m, or a command after --")
    if Path(command[0]).suffix == ".py":
        command = [sys.executable, *command]
    try:
        made = DryCuda(
            card_of(options.gpu),
            options.num_gpus,
            alone=options.alone,
            numbers=options.numbers,
            allowed=Allowed(writes=tuple(options.allow_writes), network=options.allow_network),
        )
    except ValueError as error:
        sys.stderr.write(f"dry CUDA: {error}\n")
        return _EXIT_USAGE
    with suppress(KeyboardInterrupt), interrupt_by_any_signal(), made as dry:
        return subprocess.run(dry.command(command), env=dry.environment(), check=False).returncode
    return _EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
