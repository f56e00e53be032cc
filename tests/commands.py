"""Writes docs/commands.md from the help of each command: `python -m tests.commands`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from trainer_plugins.cli import app
from trainer_plugins.plug_in.flags import SETTINGS, sort_by_panel

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
HEAD = """# Every command and flag

This page repeats `trainer-plugins COMMAND --help`. Each command has a guide, too: [plan](plan.md),
[check](check.md), [configs](launching.md), [env](allocator.md),
[exec](plug_in.md#trainer-plugins-exec), [top](watchdog.md#while-it-runs), [report](watchdog.md) and
[explain](explain.md). `python -m trainer_plugins.run SCRIPT` takes the options of `exec` that begin
with `--memory` or `--preset`.

To complete commands and flags with the Tab key, add
`eval "$(_TRAINER_PLUGINS_COMPLETE=bash_source trainer-plugins)"` to your `~/.bashrc`, or the same
with `zsh_source` to your `~/.zshrc`.
"""


def part(name: str, command: Any) -> Iterator[str]:
    """One command: its help, and its options by panel."""
    yield f"## {name}\n"
    for paragraph in command.help.split("\n\n"):
        words = " ".join(paragraph.split())
        yield re.sub(r"^(Example: (?=.)|(?=trainer-plugins ))(.*)", r"\1`\2`", words) + "\n"
    # click keeps a command's first help option: without `-h`, it would have none later.
    panels = sort_by_panel(command.list_rows(click.Context(command, **SETTINGS)))
    plain = [*panels.pop("Arguments", ()), *panels.pop("Options")]
    for panel, records in {"": plain, **panels}.items():
        yield from [f"**{panel}**\n"] if panel else []
        lines = [f"- `{flags}`: {words}" for flags, words in records if "--help" not in flags]
        yield from [*lines, ""] if lines else []


def commands(group: click.Group = app, before: str = "") -> Iterator[tuple[str, Any]]:
    """Each command and its name, in the order of the help."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, f"{name} ")
        else:
            yield f"{before}{name}", command


def page() -> str:
    return "\n".join([HEAD, *(line for one in commands() for line in part(*one))])


if __name__ == "__main__":
    PAGE.write_text(page())
