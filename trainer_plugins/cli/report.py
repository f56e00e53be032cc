"""`trainer-plugins report`: what happened to memory in a run."""

from pathlib import Path
from typing import Annotated

import typer


def report(run_dir: Annotated[Path, typer.Argument(help="The output_dir of a run with MemoryWatchdog.")]) -> None:
    """Print the peak of each moment of a run, what was released, and the findings, for every rank."""
    from rich.console import Console

    from trainer_plugins.report.text import memory_report
    from trainer_plugins.timeline import read_run

    try:
        timelines = read_run(run_dir)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    Console().print(memory_report(timelines))
    print("files: " + ", ".join(str(run_dir / "memory" / f"rank-{rank}.jsonl") for rank in timelines))
