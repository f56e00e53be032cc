"""Defines the commands of a command line with click; fields of dataclasses become options."""

import os
import re
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import Field, fields
from functools import partial, wraps
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, get_args, get_origin

import click

from trainer_plugins.printable import printable

EXIT_USAGE = 2
PATH: Any = click.Path(path_type=Path)
# Settings of a command that also hold for its subcommands.
SETTINGS: Mapping[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
    "show_default": True,
    "color": False if os.environ.get("NO_COLOR") else None,
}


def name_of(context: click.Context) -> str:
    """Return a command's name however it was started; that of `configs check` is its group's."""
    while context.parent is not None and context.parent.parent is not None:
        context = context.parent
    return f"{'trainer-plugins ' if context.parent else ''}{context.info_name}"


def refuse(prog: str, reason: object, exit_code: int = EXIT_USAGE) -> NoReturn:
    """Report bad input on one line that can be copied and searched, and exit."""
    sys.stderr.write(f"{prog}: {printable(reason)}\n")
    sys.exit(exit_code)


_JOINT = "\u2011"  # a hyphen at which no line breaks


def assign_variables(words: Sequence[str]) -> list[str]:
    """Set the variables at the start of a pasted command, as a shell would; return the rest."""
    rest = [*words]
    while rest and re.match(r"[A-Za-z_]\w*=", rest[0]):
        name, _, value = rest.pop(0).partition("=")
        os.environ[name] = value
    return rest


_Row = tuple[click.Parameter | click.Command, tuple[str, str] | None]


def sort_by_panel(rows: Iterable[_Row]) -> dict[str, list[tuple[str, str]]]:
    """Return the rows of a help by the panel of their parameter or command."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for each, row in rows:
        if row is not None:
            panels.setdefault(getattr(each, "panel", "Options"), []).append(row)
    return panels


class _Formatter(click.HelpFormatter):
    """Breaks no flag at a hyphen, so that you can copy it."""

    def write_text(self, text: str) -> None:
        super().write_text(text.replace("-", _JOINT))

    def write_dl(self, rows: Iterable[tuple[str, str]], *args: Any, **layout: Any) -> None:
        whole = [(first, second.replace("-", _JOINT)) for first, second in rows]
        super().write_dl(whole, *args, **layout)

    def write_panels(self, rows: Iterable[_Row]) -> None:
        for panel, records in sort_by_panel(rows).items():
            with self.section(panel):
                self.write_dl(records)

    def getvalue(self) -> str:
        return super().getvalue().replace(_JOINT, "-")


class _Context(click.Context):
    formatter_class = _Formatter


class Argument(click.Argument):
    """An argument with a help text, which click itself has from 8.5."""

    panel = "Arguments"

    def __init__(self, *args: Any, help: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.help: str = help

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.human_readable_name, self.help


argument = partial(click.argument, cls=Argument)


class PanelOption(click.Option):
    """An option in a panel of the help."""

    def __init__(self, *args: Any, panel: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.panel = panel


class Command(click.Command):
    """Shows its options by panel."""

    context_class, panel = _Context, "Commands"

    def list_rows(self, ctx: click.Context) -> list[_Row]:
        """Return the rows of the help for arguments and options."""
        return [(each, each.get_help_record(ctx)) for each in self.get_params(ctx)]

    def format_options(self, ctx: click.Context, formatter: Any) -> None:
        formatter.write_panels(self.list_rows(ctx))


class Group(click.Group):
    """Lists its commands by panel, in the order of their definition."""

    context_class, command_class = _Context, Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands]

    def format_commands(self, ctx: click.Context, formatter: Any) -> None:
        names = self.list_commands(ctx)
        commands: Any = [(name, self.get_command(ctx, name)) for name in names]
        formatter.write_panels((c, (name, c.get_short_help_str(1000))) for name, c in commands)


def take_options(
    name: str, kind: type[Any], shown: Container[str] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a command take a dataclass: each field with metadata is an option.

    Args:
        name: the command's parameter.
        kind: the dataclass.
        shown: the fields to list in the help; None: all.
    """
    options = [each for each in fields(kind) if each.metadata]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def call_with_options(*args: Any, **given: Any) -> Any:
            values = {each.name: given.pop(each.name) for each in options}
            return command(*args, **given, **{name: kind(**values)})

        for each in reversed(options):
            _option(each, shown is not None and each.name not in shown)(call_with_options)
        return call_with_options

    return decorate


def _option(each: "Field[Any]", is_hidden: bool) -> Callable[[Callable[..., Any]], Any]:
    """Make an option of a field; text if Python would accept an object of any type."""
    about, words = each.metadata, each.metadata["help"]
    panel = about.get("panel", "")
    # The help of an option of MemoryArguments ends with the name of its callback.
    if callback := re.search(r" \((\w+)\)$", words) if "panel" not in about else None:
        words, panel = words[: callback.start()], callback[1]
    (kind,) = {*(get_args(each.type) or [each.type])} - {NoneType, Ellipsis}
    is_switch = kind is bool
    flag = f"--{each.name.replace('_', '-')}" if each.name != "memory_preset" else "--preset"
    if is_switch and each.default is not False:
        flag = f"{flag}/--no-{flag[2:]}"
    return click.option(
        flag,
        each.name,
        cls=PanelOption,
        panel=panel or "Options",
        type={Any: str, Path: PATH}.get(kind, kind),
        is_flag=is_switch or None,
        multiple=get_origin(each.type) is tuple,
        default=each.default,
        help=words,
        metavar=about.get("metavar") or ("N" if kind in (int, float) else None),
        hidden=is_hidden,
    )
