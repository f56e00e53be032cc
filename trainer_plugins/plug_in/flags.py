"""Parses the fields of `MemoryArguments` in front of a command, for `exec` and for `run`."""

import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from inspect import Parameter, Signature
from typing import Annotated, Any, ClassVar, NoReturn

import typer
from typer.core import TyperCommand

from trainer_plugins.plug_in.options import PREFIX, MemoryArguments, kind_of, memory_arguments
from trainer_plugins.presets import PRESETS
from trainer_plugins.printable import printable

EXIT_USAGE = 2
# Typer contains a copy of click, or imports it, depending on its version.
USAGE_ERROR: Any = typer.BadParameter.__base__

# The settings of a command that has another one behind its options.
BEFORE_A_COMMAND: dict[str, Any] = {
    "allow_interspersed_args": False,
    "help_option_names": ["-h", "--help"],
    # The Trainer's own flags are written with _, so both forms are accepted.
    "token_normalize_func": lambda name: name.replace("_", "-"),
}
PRESETS_IN_WORDS = "\n\n".join(f"{preset.name}: {preset.summary}." for preset in PRESETS)


def assigned(words: Sequence[str]) -> list[str]:
    """Set the variables that a pasted command begins with, as a shell would; return the rest."""
    rest = [*words]
    while rest and re.match(r"[A-Za-z_]\w*=", rest[0]):
        name, _, value = rest.pop(0).partition("=")
        os.environ[name] = value
    return rest


class Command(TyperCommand):
    """Wraps its help between words, and lists --help in its last panel."""

    def __init__(self, *args: Any, help: str | None = None, **settings: Any) -> None:
        # Typer would break a line wherever the source does, and again at the end of the terminal.
        text = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(help or ""))
        super().__init__(*args, help=text, **settings)

    def get_params(self, ctx: Any) -> Any:
        params: Any = super().get_params(ctx)
        shown = [each for each in params if not getattr(each, "hidden", False)]
        if len(shown) > 1 and shown[-1].name == "help":
            shown[-1].rich_help_panel = getattr(shown[-2], "rich_help_panel", None)
        return params


class CommandInFront(Command):
    """Parses our options in front of another command; bad input is one line on stderr."""

    prog: ClassVar[str]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            rest: list[str] = super().parse_args(ctx, args)
            return rest
        except USAGE_ERROR as error:
            self.refuse(error.format_message())

    @classmethod
    def refuse(cls, reason: str, exit_code: int = EXIT_USAGE) -> NoReturn:
        sys.stderr.write(f"{cls.prog}: {printable(reason)}\n")
        sys.exit(exit_code)

    @classmethod
    def given(cls, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that differ from their defaults, checked, as `attach` takes them."""
        given = {
            option.name.removeprefix(PREFIX): params[option.name]
            for option in fields(MemoryArguments)
            if params[option.name] != option.default
        }
        try:
            memory_arguments(**given)
        except ValueError as error:
            cls.refuse(str(error))
        return given


def with_memory_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `MemoryArguments` to a command, which finds them in its context."""
    own = Signature.from_callable(command).parameters

    def called(**values: Any) -> None:
        command(**{name: values[name] for name in own})

    called.__doc__ = command.__doc__
    parameters = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in own.values()]
    signature = Signature([*map(_parameter, fields(MemoryArguments)), *parameters])
    called.__signature__ = signature  # type: ignore[attr-defined]
    return called


def _parameter(option: "Field[Any]") -> Parameter:
    # The help of an option ends with the name of its callback.
    words, _, callback = option.metadata["help"].removesuffix(")").partition(" (")
    name, kind = option.name, kind_of(option)
    shown = typer.Option(
        "--preset" if name == "memory_preset" else f"--{name.replace('_', '-')}",
        help=words,
        metavar="N" if kind in (int, float) else None,
        rich_help_panel=callback or None,
    )
    return Parameter(
        name, Parameter.KEYWORD_ONLY, default=option.default, annotation=Annotated[kind, shown]
    )
