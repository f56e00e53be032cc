"""The command `trainer-plugins`; each subcommand is a module, imported when it runs."""

import sys
from importlib import import_module
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any

import click

from trainer_plugins import __version__
from trainer_plugins.plug_in.flags import SETTINGS, Group
from trainer_plugins.printable import printable

_BEFORE, _DURING, _AFTER = "Before the run", "During the run", "After the run"
_PANELS = {
    "check": _BEFORE,
    "plan": _BEFORE,
    "env": _BEFORE,
    "configs": _BEFORE,
    "exec": _DURING,
    "top": _DURING,
    "report": _AFTER,
    "explain": _AFTER,
}


class _Commands(Group):
    """Has a module for each command; reports bad input in one harmless line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_PANELS]

    def panel_of(self, name: str) -> str:
        return _PANELS[name]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _PANELS:
            return None
        command: click.Command = getattr(import_module(f"{__name__}.{cmd_name}"), cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            error.message = "\n".join(map(printable, error.message.split("\n")))  # type: ignore[misc]
            raise


@click.group("trainer-plugins", cls=_Commands, context_settings=SETTINGS)
@click.version_option(__version__, message="trainer-plugins %(version)s")
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
