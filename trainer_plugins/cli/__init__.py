"""The command `trainer-plugins`; each command imports what is heavy only when it runs."""

import sys
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from trainer_plugins import __version__
from trainer_plugins.cli.check import check
from trainer_plugins.cli.configs import configs
from trainer_plugins.cli.env import env
from trainer_plugins.cli.exec import ExecCommand, exec_
from trainer_plugins.cli.explain import explain
from trainer_plugins.cli.plan import plan
from trainer_plugins.cli.report import report
from trainer_plugins.cli.spelled import CommandOfARun
from trainer_plugins.cli.top import top
from trainer_plugins.plug_in.flags import (
    BEFORE_A_COMMAND,
    PRESETS_IN_WORDS,
    USAGE_ERROR,
    Command,
)
from trainer_plugins.printable import printable


class _Commands(TyperGroup):  # reports bad input in one harmless line
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except USAGE_ERROR as error:
            error.message = printable(error.message)
            raise


_BEFORE, _DURING, _AFTER = "Before the run", "During the run", "After the run"

app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_with_other_flags = {"allow_extra_args": True, "ignore_unknown_options": True}
app.command(rich_help_panel=_BEFORE, context_settings=_with_other_flags)(check)
app.command(rich_help_panel=_BEFORE, context_settings=_with_other_flags)(plan)
app.command(rich_help_panel=_BEFORE)(env)
app.command(
    "exec",
    cls=ExecCommand,
    rich_help_panel=_DURING,
    context_settings=BEFORE_A_COMMAND,
    epilog=PRESETS_IN_WORDS,
)(exec_)
app.command(rich_help_panel=_DURING)(top)
app.command(rich_help_panel=_AFTER)(report)
app.command(rich_help_panel=_AFTER)(explain)
app.add_typer(configs, name="configs", rich_help_panel=_BEFORE)
for each in (*app.registered_commands, *configs.registered_commands):
    each.cls = each.cls if each.name == "exec" else Command
for each in app.registered_commands[:2]:  # check and plan
    each.cls = CommandOfARun


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
    # The locale may lack a character of a file name.
    sys.stdout = TextIOWrapper(buffered, encoding, "backslashreplace", line_buffering=is_terminal)
    sys.stderr.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    app()


class _Output(FileIO):
    """Writes to standard output, and drops the rest once its reader is gone, as after `| head`."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)
