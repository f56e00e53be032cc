"""Parses the options of the callbacks in front of another command."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import click

from trainer_plugins.plug_in.flags import SETTINGS, Command, name_of, refuse
from trainer_plugins.plug_in.options import PREFIX, MemoryArguments
from trainer_plugins.presets import PRESETS

_SETTINGS: dict[str, Any] = {
    **SETTINGS,
    "allow_interspersed_args": False,
    # The Trainer's own flags are written with _, so both forms are accepted.
    "token_normalize_func": lambda name: name.replace("_", "-"),
}
_PRESETS = "\n\n".join(f"{preset.name}: {preset.summary}." for preset in PRESETS)


class CommandInFront(Command):
    """Parses our options in front of another command; bad input is one line on stderr."""

    def __init__(self, name: str | None, **settings: Any) -> None:
        super().__init__(name, context_settings=_SETTINGS, epilog=_PRESETS, **settings)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            rest = super().parse_args(ctx, args)
            MemoryArguments(
                **{each.name: ctx.params[each.name] for each in fields(MemoryArguments)}
            )
        except click.UsageError as error:
            refuse(name_of(ctx), error.format_message())
        except ValueError as error:
            refuse(name_of(ctx), error)
        return rest


def select_given(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that differ from their defaults, in the form that `attach` takes."""
    return {
        option.name.removeprefix(PREFIX): params[option.name]
        for option in fields(MemoryArguments)
        if params[option.name] != option.default
    }
