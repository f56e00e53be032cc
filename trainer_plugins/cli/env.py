"""`trainer-plugins env`: the environment of a launch, as lines that a shell reads."""

import json
import os
import shlex
import sys
from dataclasses import asdict
from enum import Enum
from typing import Annotated

import typer

from trainer_plugins.printable import printable


class Shell(str, Enum):
    """The shells whose syntax is known. Any POSIX shell reads that of bash."""

    BASH = "bash"
    FISH = "fish"


def env(
    shell: Annotated[Shell, typer.Option(help="Whose syntax to print.")] = Shell.BASH,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of shell lines.")
    ] = False,
    vllm: Annotated[
        bool, typer.Option("--vllm", help="vLLM is to run inside the training process.")
    ] = False,
) -> None:
    """Print what to export before a launch on this machine: eval "$(trainer-plugins env)".

    In fish: trainer-plugins env --shell fish | source. What is wrong with the allocator settings of
    now goes to stderr.
    """
    from trainer_plugins.launch.environment import gather, launch_environment

    environment = launch_environment(os.environ, gather(os.environ, with_vllm=vllm))
    for finding in environment.findings:
        print(finding, file=sys.stderr)
    if as_json:
        print(json.dumps(asdict(environment), indent=2))
        return
    if environment.allocator not in {export.purpose for export in environment.exports}:
        print(f"# {printable(environment.allocator)}")
    for export in environment.exports:
        print(f"# {printable(export.purpose)}")
        if shell is Shell.FISH:
            print(f"set -gx {export.name} {_fish_quoted(export.value)}")
        else:
            print(f"export {export.name}={shlex.quote(export.value)}")


def _fish_quoted(text: str) -> str:
    """Quote for fish, in whose single quotes a backslash escapes itself and the quote."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
