"""Find the launcher that started this process, and its settings."""

import contextlib
import io
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from trainer_plugins.launch.lint.document import read_deepspeed
from trainer_plugins.launch.masked import mask_command, mask_fields, mask_text
from trainer_plugins.record.run_facts import Launch

_LAUNCHERS = {"torchrun": "torchrun", "torch.distributed.run": "torchrun", "deepspeed": "deepspeed"}
EXPORTED = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
_DEEPSPEED_FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"


class Launcher(NamedTuple):
    """Describes one call of `accelerate launch`."""

    arguments: tuple[str, ...]  # the arguments after `launch`
    folder: Path  # its working directory; its paths are relative to that

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
    """Find the `accelerate launch` that started this process, if we may read it."""
    for words, folder in _launchers_above():
        match words:
            case ["accelerate", "launch", *arguments]:
                return Launcher(tuple(arguments), folder)
            # An accelerate above torchrun did not launch these ranks. With several machines,
            # however, accelerate itself starts DeepSpeed's launcher.
            case ["torchrun", *_]:
                return None
    return None


def launch_of(environ: Mapping[str, str]) -> Launch:
    """Describe how this process was launched, without secrets. Takes a few milliseconds."""
    launcher, file = find_launcher(), None
    if launcher is None:
        words = next((words for words, _ in _launchers_above()), [])
    else:
        words = ["accelerate", "launch", *launcher.arguments]
        flags = launcher.flags()
        file = launcher.file(flags) if flags is not None else None
    # accelerate's exports count even without a launcher, or if the file has changed since.
    exported = {name: text for name, text in environ.items() if name.startswith(EXPORTED)}
    named = exported.pop(_DEEPSPEED_FILE, None)
    document = read_deepspeed(named)
    if document.json_path is not None:
        exported[_DEEPSPEED_FILE] = document.json_path
    return Launch(
        file="" if file is None else mask_text(os.fspath(file)),
        words=mask_command(words),
        environment={name: str(text) for name, text in mask_fields(exported, exported).items()},
        deepspeed=mask_fields(document.deepspeed or {}),
    )


def launcher_words(command: list[str]) -> list[str]:
    """Return a launcher's command line as you would type it; empty for any other command.

    >>> launcher_words(["/venv/bin/python3", "/venv/bin/torchrun", "--nnodes", "1", "train.py"])
    ['torchrun', '--nnodes', '1', 'train.py']
    >>> launcher_words(["python", "/venv/bin/accelerate", "launch", "--cpu", "train.py"])
    ['accelerate', 'launch', '--cpu', 'train.py']
    >>> launcher_words(["python", "-m", "torch.distributed.run", "train.py"])
    ['torchrun', 'train.py']
    >>> launcher_words(["python", "train.py", "--deepspeed", "ds.json"])
    []
    """
    for place, word in enumerate(command[:4]):
        path, rest = Path(word), command[place + 1 :]
        if path.stem == "accelerate" and rest[:1] == ["launch"]:
            return ["accelerate", *rest]
        is_file = path.parts[-3:] == ("accelerate", "commands", "launch.py")
        if is_file or path.stem == "accelerate-launch" or word == "accelerate.commands.launch":
            return ["accelerate", "launch", *rest]
        if name := _LAUNCHERS.get(path.name):
            return [name, *rest]
    return []


def _launchers_above() -> Iterator[tuple[list[str], Path]]:
    """Yield the command line and folder of each readable launcher among the parent processes."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().parents():
            with contextlib.suppress(psutil.Error, OSError):
                if words := launcher_words(process.cmdline()):
                    yield words, Path(process.cwd())
