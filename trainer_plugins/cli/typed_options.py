"""Define the options that several commands share, and their errors."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from trainer_plugins.plug_in.flags import EXIT_USAGE, PATH, argument
from trainer_plugins.printable import printable

take_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
take_vllm = click.option("--vllm", is_flag=True, help="vLLM will run inside the training process.")
take_run_dir = argument("run_dir", type=PATH, help="The output_dir of a run with MemoryWatchdog.")


@contextmanager
def bad_parameters(path: Path | str) -> Iterator[None]:
    """Report errors of reading or writing, by default of this path, as a bad parameter."""
    try:
        yield
    except OSError as error:
        why = f"{error.filename or path}: {error.strerror or error}"
        raise click.BadParameter(why) from error
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@contextmanager
def refuse_bad_input(command: str, *kinds: type[Exception]) -> Iterator[None]:
    """Report errors of these kinds on one line that can be copied and searched for."""
    try:
        yield
    except kinds as error:
        print(f"trainer-plugins {command}: {printable(error)}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE) from error
