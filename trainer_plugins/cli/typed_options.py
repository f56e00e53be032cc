"""Define the options that several commands share, and their errors."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from trainer_plugins.plug_in.flags import EXIT_USAGE
from trainer_plugins.printable import printable

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Vllm = Annotated[bool, typer.Option("--vllm", help="vLLM will run inside the training process.")]
RunDir = Annotated[Path, typer.Argument(help="The output_dir of a run with MemoryWatchdog.")]


@contextmanager
def bad_parameters(path: Path | str) -> Iterator[None]:
    """Report errors of reading or writing, by default of this path, as a bad parameter."""
    try:
        yield
    except OSError as error:
        why = f"{error.filename or path}: {error.strerror or error}"
        raise typer.BadParameter(why) from error
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@contextmanager
def refuse_bad_input(command: str, *kinds: type[Exception]) -> Iterator[None]:
    """Report errors of these kinds on one line that can be copied and searched for."""
    try:
        yield
    except kinds as error:
        print(f"trainer-plugins {command}: {printable(error)}", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE) from error
