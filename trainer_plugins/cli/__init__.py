"""The command `trainer-plugins`; each subcommand is a module, imported when it runs."""

import sys
from importlib import import_module
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any

import click

from trainer_plugins.plug_in.flags import SETTINGS, Group
from trainer_plugins.printable import printable

_PANELS: Any = {
    **dict.fromkeys(("check", "plan", "env", "configs"), "Before the run"),
    **dict.fromkeys(("exec", "top"), "During the run"),
    **dict.fromkeys(("report", "explain"), "After the run"),
}


class _Commands(Group):
    """Has a module for each command; reports bad input in one harmless line."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> Any:
        if cmd_name not in _PANELS:
            return None
        command = getattr(import_module(f"{__name__}.{cmd_name}"), cmd_name)
        command.panel = _PANELS[cmd_name]
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            error.message = "\n".join(map(printable, error.message.split("\n")))  # type: ignore[misc]
            raise
        except KeyboardInterrupt:
            raise SystemExit(130) from None  # as a shell does


# Of `commands` only the names are read.
@click.group("trainer-plugins", cls=_Commands, commands=_PANELS, context_settings=SETTINGS)
@click.version_option(package_name="trainer-plugins", message="trainer-plugins %(version)s")
def app() -> None:
    """Predict the memory of Hugging Face Trainer runs, survive OOM, and explain both."""


def main() -> None:
    """Run the command line; docs/json.md has the exit codes."""
    buffered = BufferedWriter(_Output(sys.stdout.fileno(), "w", closefd=False))
    is_terminal, encoding = sys.stdout.isatty(), sys.stdout.encoding
    # The locale may not be able to encode every file name.
    sys.stdout = TextIOWrapper(buffered, encoding, "backslashreplace", line_buffering=is_terminal)
    sys.stderr.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    app()


class _Output(FileIO):
    """Writes to standard output, and drops the rest once the reader is gone, as after `| head`."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)
