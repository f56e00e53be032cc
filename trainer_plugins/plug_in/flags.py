"""Turns fields of dataclasses into options, and parses them in front of another command."""

import inspect
import os
import re
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from functools import update_wrapper
from inspect import Parameter, Signature
from typing import Annotated, Any, ClassVar, NoReturn, get_args

import typer
from typer.core import TyperCommand

from trainer_plugins.plug_in.options import PREFIX, MemoryArguments
from trainer_plugins.presets import PRESETS
from trainer_plugins.printable import printable

EXIT_USAGE = 2
# Typer contains a copy of click, or imports it, depending on its version.
USAGE_ERROR: Any = typer.BadParameter.__base__

# Settings for a command that takes another command after its options.
BEFORE_A_COMMAND: dict[str, Any] = {
    "allow_interspersed_args": False,
    "help_option_names": ["-h", "--help"],
    # The Trainer's own flags are written with _, so both forms are accepted.
    "token_normalize_func": lambda name: name.replace("_", "-"),
}
PRESETS_IN_WORDS = "\n\n".join(f"{preset.name}: {preset.summary}." for preset in PRESETS)


def assign_variables(words: Sequence[str]) -> list[str]:
    """Set the variables at the start of a pasted command, as a shell would; return the rest."""
    rest = [*words]
    while rest and re.match(r"[A-Za-z_]\w*=", rest[0]):
        name, _, value = rest.pop(0).partition("=")
        os.environ[name] = value
    return rest


class Command(TyperCommand):
    """Wraps its help between words, and lists --help in its last panel."""

    def __init__(self, *args: Any, help: str | None = None, **settings: Any) -> None:
        # Typer would break lines where the source does, and again at the end of the terminal.
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
            MemoryArguments(
                **{each.name: ctx.params[each.name] for each in fields(MemoryArguments)}
            )
        except USAGE_ERROR as error:
            self.refuse(error.format_message())
        except ValueError as error:
            self.refuse(str(error))
        return rest

    @classmethod
    def refuse(cls, reason: str, exit_code: int = EXIT_USAGE) -> NoReturn:
        sys.stderr.write(f"{cls.prog}: {printable(reason)}\n")
        sys.exit(exit_code)

    @staticmethod
    def select_given(params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that differ from their defaults, in the form that `attach` takes."""
        return {
            option.name.removeprefix(PREFIX): params[option.name]
            for option in fields(MemoryArguments)
            if params[option.name] != option.default
        }


def take_options(
    first: str = "", shown: Container[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command take dataclasses: each field with metadata is an option.

    Args:
        first: the first panel of the help.
        shown: the fields to list in the help; None: all.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = Signature.from_callable(command).parameters.values()
        options: list[Parameter] = []
        for each in own:
            kind: Any = each.annotation
            if is_dataclass(kind):
                options += [_option(one, shown) for one in fields(kind) if one.metadata]
            else:
                options.append(each.replace(kind=Parameter.KEYWORD_ONLY))

        def call_with_options(**given: Any) -> None:
            command(**{each.name: _value_of(each, given) for each in own})

        update_wrapper(call_with_options, command)
        options.sort(key=lambda option: _panel(option) != first)
        call_with_options.__signature__ = Signature(options)  # type: ignore[attr-defined]
        return call_with_options

    return decorate


def _option(each: "Field[Any]", shown: Container[str] | None) -> Parameter:
    """Make a typer option of a field; text if Python would accept an object of any type."""
    about, words = each.metadata, each.metadata["help"]
    if "panel" in about:
        panel, metavar = about["panel"], about["metavar"]
    else:  # of MemoryArguments: the help of an option ends with the name of its callback
        panel = ""
        if callback := re.search(r" \((\w+)\)$", words):
            words, panel = words[: callback.start()], callback[1]
        metavar = "N" if each.type in (int, float) else None
    name = "preset" if each.name == "memory_preset" else each.name
    # A switch that is off by default has no --no- form.
    is_spelled = each.default is False or name != each.name
    info = typer.Option(
        *[f"--{name.replace('_', '-')}"] * is_spelled,
        help=words,
        metavar=metavar,
        rich_help_panel=panel or None,
        hidden=shown is not None and each.name not in shown,
    )
    kind: Any = str | None if each.type is Any else each.type
    return Parameter(
        each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=Annotated[kind, info]
    )


def _value_of(parameter: Parameter, given: Mapping[str, Any]) -> Any:
    """Return the value of an option, or a dataclass of the values of several."""
    if not is_dataclass(parameter.annotation):
        return given[parameter.name]
    make: Any = parameter.annotation
    return make(**{each.name: given[each.name] for each in fields(make) if each.metadata})


def _panel(option: Parameter) -> str | None:
    return next((each.rich_help_panel for each in get_args(option.annotation)[1:]), None)
