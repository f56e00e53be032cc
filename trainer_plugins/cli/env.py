"""`trainer-plugins env`: print the environment for a launch, or the facts for a bug report."""

import json
import os
import shlex
import sys

import click

from trainer_plugins.cli.as_json import print_json
from trainer_plugins.cli.typed_options import take_as_json, take_vllm
from trainer_plugins.launch.environment import launch_environment
from trainer_plugins.plug_in.flags import Command
from trainer_plugins.printable import printable


@click.command(cls=Command)
@click.option(
    "--shell",
    type=click.Choice(["bash", "fish"]),  # every POSIX shell reads bash's syntax
    default="bash",
    help="The shell whose syntax to print.",
)
@take_as_json
@take_vllm
@click.option("--info", is_flag=True, help="Print versions, cards and settings for a bug report.")
def env(shell: str, as_json: bool, vllm: bool, info: bool) -> None:
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
        if shell == "fish":
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
