"""Parses the fields of `MemoryArguments` on a command line, before a command with its own flags."""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import Field, fields
from types import MappingProxyType
from typing import Any, NoReturn

from trainer_plugins.plug_in.options import PREFIX, MemoryArguments, kind_of, memory_arguments
from trainer_plugins.presets import nearest
from trainer_plugins.printable import printable

EXIT_USAGE = 2


class Flags:
    """Parses our flags in front of a command, the same for `run` and `exec`."""

    def __init__(
        self,
        prog: str,
        command: str,
        description: str,
        takes_module: bool = False,
        switches: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.prog = prog
        self.names: list[str] = []
        self.switched_on: set[str] = set()
        """The names of the given switches."""

        self.parser = argparse.ArgumentParser(
            prog=prog,
            usage=f"{prog} [--preset PRESET] [--memory-... VALUE ...] {command}",
            description=description,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        self.parser.error = self.refuse  # type: ignore[method-assign, assignment]
        for option in fields(MemoryArguments):
            flag, kind = flag_of(option), kind_of(option)
            self.names.append(flag)
            # The Trainer's own flags are written with _, so both forms are accepted.
            underscored = f"--{flag[2:].replace('-', '_')}"
            takes: dict[str, Any] = {"type": kind, "metavar": kind.__name__.upper()}
            self.parser.add_argument(
                *dict.fromkeys((flag, underscored)),
                dest=option.name,
                help=f"{option.metadata['help']} Default: {option.default}.",
                **({"action": "store_true"} if kind is bool else takes),
            )
        for name, its_help in switches.items():
            self.names.append(f"--{name}")
            self.parser.add_argument(
                f"--{name}", dest="switches", action="append_const", const=name, help=its_help
            )
        if takes_module:
            self.parser.add_argument(
                "-m", action="append_const", const="-m", dest="module", help="run a module"
            )
        self.parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    def split(self, arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
        """Separate our options from the command that follows.

        Bad input ends the process with one line on stderr and exit code 2.

        Returns:
            The checked options for `attach`, and the command.
        """
        parsed, unknown = self.parser.parse_known_args(arguments)
        given = vars(parsed)
        self.switched_on.update(given.pop("switches", ()))
        command: list[str] = [*given.pop("module", []), *given.pop("command")]
        if unknown:
            flag = unknown[0].partition("=")[0]
            self.refuse(
                f"there is no option {flag}.{nearest(flag, self.names)} Known options:"
                f" {', '.join(self.names)}"
            )
        if command[:1] == ["--"]:
            del command[0]
        given = {name.removeprefix(PREFIX): value for name, value in given.items()}
        try:
            memory_arguments(**given)
        except ValueError as error:
            self.refuse(str(error))
        return given, command

    def refuse(self, reason: str, exit_code: int = EXIT_USAGE) -> NoReturn:
        """End the process with one line on stderr and an exit code, by default 2."""
        sys.stderr.write(f"{self.prog}: {printable(reason)}\n")
        sys.exit(exit_code)


def flag_of(option: "Field[Any]") -> str:
    """Return the flag of a field of `MemoryArguments`: `--preset`, `--memory-every-steps`."""
    name = "preset" if option.name == "memory_preset" else option.name
    return "--" + name.replace("_", "-")
