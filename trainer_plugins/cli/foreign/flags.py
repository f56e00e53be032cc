"""Lets `plan` and `check` take flags as other programs spell them, and their files."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import typer

from trainer_plugins.plug_in.flags import EXIT_USAGE, Command
from trainer_plugins.printable import printable

_TRUTHS = ("true", "false", "yes", "no")


class CommandOfARun(Command):
    """Understands other programs' flags before it parses its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from trainer_plugins.planner.plan import PlanError

        end = args.index("--") if "--" in args else len(args)
        own = {flag: each for each in self.params for flag in (*each.opts, *each.secondary_opts)}
        try:
            words = as_ours(args[:end], own)
        except PlanError as error:
            print(f"trainer-plugins {ctx.info_name}: {printable(error)}", file=sys.stderr)
            raise typer.Exit(EXIT_USAGE) from error
        rest: list[str] = super().parse_args(ctx, [*words, *args[end:]])
        return rest


def as_ours(words: Sequence[str], own: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line as `plan` spells them; `own` are its options by flag."""
    from trainer_plugins.cli.foreign.reading import OPTIONS, is_spelling, is_true

    kept: list[str] = []
    named: dict[str, Any] = {}
    again: list[str] = []  # the words of `named`, if nothing in them is spelt otherwise
    is_foreign = False
    for spelt, values in _flags(words, own):
        flag = f"--{spelt.lstrip('-').replace('_', '-')}" if spelt.startswith("--") else spelt
        option = own.get(flag)
        if option is not None and option.name == "config":
            is_foreign = True
            named["config"] = values[0] if values else None
        elif option is not None and not (spelt.startswith("--") and option.name in OPTIONS):
            kept += [flag, *values]
        elif spelt.startswith("--"):
            name = option.name if option is not None else flag[2:].replace("-", "_")
            value: Any = values[0] if len(values) == 1 else values or True
            if option is not None and option.is_flag:
                is_off = value is True and flag in option.secondary_opts
                value = not is_off and value
                again += [flag] * (is_true(value) or flag.startswith("--no-"))
            else:
                again += [flag if option is not None else spelt, *values]
            named[name] = value
            is_foreign = is_foreign or (option is None and is_spelling(name))
        else:
            again += [spelt, *values]
    if not is_foreign:
        return [*kept, *again]
    return [*kept, *_understood(named)]


def _flags(words: Sequence[str], own: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag with the words that are its values; a stray word is a flag of its own."""
    index = 0
    while index < len(words):
        spelt, equals, value = words[index].partition("=")
        index += 1
        if not spelt.startswith("-") or not spelt.lstrip("-"):
            yield words[index - 1], []
            continue
        option = own.get(f"--{spelt.lstrip('-').replace('_', '-')}")
        values = [value] if equals else []
        while not equals and index < len(words) and not _is_flag(words[index]):
            most = 1 if option is None or not hasattr(option, "nargs") else option.nargs
            is_done = option is not None and len(values) >= most
            if is_done or (
                option is not None and option.is_flag and words[index].lower() not in _TRUTHS
            ):
                break
            values.append(words[index])
            index += 1
        yield spelt, values


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word.startswith("-") and not word[1].isdigit()


def _understood(named: dict[str, Any]) -> list[str]:
    from trainer_plugins.cli.foreign.pasted import of_file
    from trainer_plugins.cli.foreign.reading import Reading, finish, tell

    file = named.pop("config", None)
    if file is None:
        reading = finish(Reading(named), keeps_unknown=True)
    else:
        reading = of_file(file, named, named.get("trainer"))
        tell(reading)
    return reading.words()
