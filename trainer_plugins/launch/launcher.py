"""Find the `accelerate launch` that started this process, and what it was given."""

import contextlib
import io
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_LAUNCHERS = {
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
    "deepspeed": "deepspeed",
}


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
    """Find the `accelerate launch` that started this process, if it may be looked at."""
    for command, folder in _commands_above():
        if (arguments := launch_arguments(command)) is not None:
            return Launcher(tuple(arguments), folder)
        # An accelerate above torchrun did not launch these ranks. DeepSpeed's launcher is another
        # matter: accelerate starts that itself for several machines.
        if launcher_words(command)[:1] == ["torchrun"]:
            return None
    return None


def launched_by() -> list[str]:
    """Return the command line of the launcher above this process; empty without one."""
    if (accelerate := find_launcher()) is not None:
        return ["accelerate", "launch", *accelerate.arguments]
    found = (launcher_words(command) for command, _ in _commands_above())
    return next(filter(None, found), [])


def launcher_words(command: list[str]) -> list[str]:
    """Return the command line of a launcher as one types it; empty for any other command.

    >>> launcher_words(["/venv/bin/python3", "/venv/bin/torchrun", "--nnodes", "1", "train.py"])
    ['torchrun', '--nnodes', '1', 'train.py']
    >>> launcher_words(["python", "-m", "torch.distributed.run", "train.py"])
    ['torchrun', 'train.py']
    >>> launcher_words(["python", "train.py", "--deepspeed", "ds.json"])
    []
    """
    if (arguments := launch_arguments(command)) is not None:
        return ["accelerate", "launch", *arguments]
    for place, word in enumerate(command[:4]):
        if name := _LAUNCHERS.get(Path(word).name):
            return [name, *command[place + 1 :]]
    return []


def _commands_above() -> Iterator[tuple[list[str], Path]]:
    """Yield command line and folder of the processes above, as far as they may be looked at."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().parents():
            with contextlib.suppress(psutil.Error, OSError):
                yield process.cmdline(), Path(process.cwd())


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
