"""Parses the options of the callbacks in front of another command."""

import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, NoReturn

import click

from trainer_plugins.plug_in.flags import EXIT_USAGE, SETTINGS, Command
from trainer_plugins.plug_in.options import PREFIX, MemoryArguments
from trainer_plugins.presets import PRESETS
from trainer_plugins.printable import printable

# Settings for a command that takes another command after its options.
BEFORE_A_COMMAND: dict[str, Any] = {
    **SETTINGS,
    "allow_interspersed_args": False,
    # The Trainer's own flags are written with _, so both forms are accepted.
    "token_normalize_func": lambda name: name.replace("_", "-"),
}
PRESETS_IN_WORDS = "\n\n".join(f"{preset.name}: {preset.summary}." for preset in PRESETS)


class CommandInFront(Command):
    """Parses our options in front of another command; bad input is one line on stderr."""

    prog: ClassVar[str]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            rest = super().parse_args(ctx, args)
            MemoryArguments(
                **{each.name: ctx.params[each.name] for each in fields(MemoryArguments)}
            )
        except click.UsageError as error:
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
