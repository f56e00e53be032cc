"""Writes docs/commands.md from the help of each command: `python -m tests.commands`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from trainer_plugins.cli import app

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
HEAD = """# Every command and flag

This page repeats `trainer-plugins COMMAND --help`. Each command has a guide, too: [plan](plan.md),
[check](check.md), [configs](launching.md), [env](allocator.md),
[exec](plug_in.md#trainer-plugins-exec), [top](watchdog.md#while-it-runs), [report](watchdog.md) and
[explain](explain.md). `python -m trainer_plugins.run SCRIPT` takes the options of `exec` that begin
with `--memory` or `--preset`.
"""


def option(param: Any, context: Any) -> str:
    """One option or argument, with its value, its help and its default."""
    flags = "/".join(each for each in (*param.opts, *param.secondary_opts) if each[:2] == "--")
    value = param.metavar or (str(param.display_type(context)) if flags else param.name.upper())
    for kind, word in (
        ("bool", ""),
        ("path", "PATH"),
        ("str", "TEXT"),
        ("int", "N"),
        ("float", "N"),
    ):
        is_kind = re.fullmatch(rf"<(list\[)?{kind}\]?( range)?>", value, re.IGNORECASE)
        value = word if is_kind else value
    typed = f"{flags} {value}".strip()
    default = getattr(param.default, "value", param.default)
    is_plain = isinstance(default, str | int | float) and not isinstance(default, bool)
    return f"- `{typed}`: {param.help}" + f" Default: `{default}`." * is_plain


def part(name: str, command: Any) -> Iterator[str]:
    """One command: its help, and its options by panel."""
    yield f"## {name}\n"
    for paragraph in command.help.split("\n\n"):
        words = " ".join(paragraph.split())
        yield re.sub(r"^(Example: (?=.)|(?=trainer-plugins ))(.*)", r"\1`\2`", words) + "\n"
    context, panels = typer.Context(command), dict[str, list[str]]()
    for param in command.get_params(context):
        if not getattr(param, "hidden", False) and param.name != "help":
            panels.setdefault(param.rich_help_panel or "", []).append(option(param, context))
    for panel, lines in sorted(panels.items(), key=lambda item: bool(item[0])):
        yield from [f"**{panel}**\n"] if panel else []
        yield from lines
        yield ""


def page() -> str:
    group: Any = typer.main.get_command(app)
    lines: list[str] = []
    for name in group.commands:
        command = group.get_command(None, name)
        for inner in getattr(command, "commands", None) or [""]:
            one = command.get_command(None, inner) if inner else command
            lines += part(f"{name} {inner}".strip(), one)
    return "\n".join([HEAD, *lines])


if __name__ == "__main__":
    PAGE.write_text(page())
