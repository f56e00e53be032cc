"""`trainer-plugins report`: prints what happened to memory in a run."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    run_dir: Annotated[Path, typer.Argument(help="The output_dir of a run with MemoryWatchdog.")],
) -> None:
    """Print how a run ended, the peak of each moment, releases and findings, for every rank.

    If several runs wrote into the folder, each gets a block, the last one first.

    Example: trainer-plugins report runs/my-run

    Exit codes: 0 printed; 2 nothing to read.
    """
    from trainer_plugins.explain.ending import how_it_ended
    from trainer_plugins.record.history import read_history
    from trainer_plugins.report.page import show
    from trainer_plugins.report.text import history_report

    try:
        history = read_history(run_dir)
    except OSError as error:
        raise typer.BadParameter(f"{error.filename or run_dir}: {error.strerror}") from error
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    show(history_report(history, how_it_ended(history, run_dir)))
