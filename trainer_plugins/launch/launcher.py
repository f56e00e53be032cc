"""Find the `accelerate launch` that started this process, and what it was given."""

import contextlib
import io
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Launcher:
    """Describes one call of `accelerate launch`."""

    arguments: tuple[str, ...]
    """The arguments after `launch`."""

    folder: Path
    """The folder where it was started; its paths are relative to that."""

    def flags(self) -> Namespace | None:
        """Parse the arguments as accelerate does; None if its version does not know them."""
        from accelerate.commands.launch import launch_command_parser

        try:
            with contextlib.redirect_stderr(io.StringIO()):
                parsed: Namespace = launch_command_parser().parse_args(list(self.arguments))
                return parsed
        except (SystemExit, ValueError):
            return None

    def file(self, flags: Namespace) -> Path | None:
        """Return the launch file: the named one, or the user's default if accelerate reads that."""
        from accelerate.commands.config.config_args import default_config_file

        if flags.config_file:
            return self.folder / str(flags.config_file)
        default = Path(str(default_config_file))
        return default if default.is_file() and not flags.cpu else None


def find_launcher() -> Launcher | None:
    """Find the nearest launcher above this process.

    None if it is not accelerate's, or may not be looked at.
    """
    try:
        above = psutil.Process().parents()
    except psutil.Error:
        return None
    for process in above:
        try:
            command, folder = process.cmdline(), Path(process.cwd())
        except (psutil.Error, OSError):
            continue
        if (arguments := launch_arguments(command)) is not None:
            return Launcher(tuple(arguments), folder)
        if any(
            Path(word).stem == "torchrun" or word == "torch.distributed.run" for word in command[:4]
        ):
            return None  # an accelerate further up did not launch these ranks
    return None


def launch_arguments(command: list[str]) -> list[str] | None:
    """Return what follows `accelerate launch` in a command line; None for any other command.

    >>> launch_arguments(["python", "/venv/bin/accelerate", "launch", "--cpu", "train.py"])
    ['--cpu', 'train.py']
    >>> launch_arguments(["python", "train.py"])
    """
    for place, word in enumerate(command[:4]):
        stem = Path(word).stem
        if stem == "accelerate" and command[place + 1 : place + 2] == ["launch"]:
            return command[place + 2 :]
        if stem == "accelerate-launch" or word == "accelerate.commands.launch":
            return command[place + 1 :]
        if Path(word).parts[-3:] == ("accelerate", "commands", "launch.py"):
            return command[place + 1 :]
    return None
