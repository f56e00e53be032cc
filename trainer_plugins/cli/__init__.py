"""The command `trainer-plugins`; each subcommand is a module, imported when it runs."""

import sys
from importlib import import_module
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from trainer_plugins import __version__
from trainer_plugins.plug_in.flags import USAGE_ERROR
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


class _Commands(TyperGroup):
    """Has a module for each command; reports bad input in one harmless line."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = _PANELS  # only the names are read

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _PANELS:
            return None
        command: Any = typer.main.get_command(import_module(f"{__name__}.{cmd_name}").app)
        command.name, command.rich_help_panel = cmd_name, _PANELS[cmd_name]
        return command

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except USAGE_ERROR as error:
            error.message = printable(error.message)
            raise


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"trainer-plugins {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
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
