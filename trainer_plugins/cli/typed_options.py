"""Define the options that several commands share, and their errors."""

from collections.abc import Iterator
from contextlib import contextmanager

import click

from trainer_plugins.plug_in.flags import PATH, argument, name_of, refuse

take_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
take_vllm = click.option("--vllm", is_flag=True, help="vLLM will run inside the training process.")
take_run_dir = argument("run_dir", type=PATH, help="The output_dir of a run with MemoryWatchdog.")


@contextmanager
def refuse_bad_input(*kinds: type[Exception]) -> Iterator[None]:
    """Report errors of files, and of these kinds, on one line that can be copied and searched."""
    refused: tuple[type[Exception], ...] = (OSError, *kinds)
    try:
        yield
    except refused as error:
        why = str(error)
        if isinstance(error, OSError) and error.filename:
            why = f"{error.filename}: {error.strerror}"
        refuse(name_of(click.get_current_context()), why)
