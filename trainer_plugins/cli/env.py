"""`trainer-plugins env`: print the environment for a launch, or the facts for a bug report."""

import json
import os
import shlex
import sys
from enum import Enum
from typing import Annotated

import typer

from trainer_plugins.cli.as_json import print_json
from trainer_plugins.cli.typed_options import AsJson, Vllm
from trainer_plugins.launch.environment import launch_environment
from trainer_plugins.plug_in.flags import Command
from trainer_plugins.printable import printable

app = typer.Typer(add_completion=False)


class Shell(str, Enum):
    """Names the shells whose syntax we know; every POSIX shell reads bash's."""

    BASH = "bash"
    FISH = "fish"


@app.command(cls=Command)
def env(
    shell: Annotated[Shell, typer.Option(help="The shell whose syntax to print.")] = Shell.BASH,
    as_json: AsJson = False,
    vllm: Vllm = False,
    info: Annotated[
        bool,
        typer.Option("--info", help="Print versions, cards and settings for a bug report."),
    ] = False,
) -> None:
    """Print what to export before a launch on this machine: eval "$(trainer-plugins env)".

    In fish: trainer-plugins env --shell fish | source. Problems with the present allocator settings
    go to stderr.
    """
    if info:
        _print_info(as_json)
        return
    environment = launch_environment(os.environ, with_vllm=vllm)
    for finding in environment.findings:
        print(finding, file=sys.stderr)
    if as_json:
        print_json("env", environment)
        return
    if environment.allocator not in {export.purpose for export in environment.exports}:
        print(f"# {printable(environment.allocator)}")
    for export in environment.exports:
        print(f"# {printable(export.purpose)}")
        if shell is Shell.FISH:
            print(f"set -gx {export.name} {_fish_quoted(export.value)}")
        else:
            print(f"export {export.name}={shlex.quote(export.value)}")


def _print_info(as_json: bool) -> None:
    from trainer_plugins.launch.place import describe_place

    facts = describe_place(os.environ)
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    for group, lines in facts.items():
        print(f"{group}:{'' if lines else ' torch defaults, no variable is set'}")
        for name, text in lines.items():
            print(f"  {name}: {printable(text)}")


def _fish_quoted(text: str) -> str:
    """Quote for fish: inside its single quotes a backslash escapes itself and the quote."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
