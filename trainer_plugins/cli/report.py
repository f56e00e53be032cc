"""`trainer-plugins report`: what happened to memory in a run."""

import re
from pathlib import Path
from typing import Annotated

import typer


def report(run_dir: Annotated[Path, typer.Argument(help="The output_dir of a run with MemoryWatchdog.")]) -> None:
    """Print the peak of each moment of a run, what was released, and the findings, for every rank."""
    from rich.console import Console

    from trainer_plugins.report.text import memory_report
    from trainer_plugins.timeline import read_timeline

    found = ((re.fullmatch(r"rank-(\d+)", path.stem), path) for path in run_dir.glob("memory/rank-*.jsonl"))
    files = {int(match[1]): path for match, path in found if match}
    if not files:
        raise typer.BadParameter(
            f"{run_dir} has no memory/rank-*.jsonl: give the output_dir of a run that had MemoryWatchdog"
        )
    Console().print(memory_report({rank: read_timeline(path) for rank, path in files.items()}))
    print("files: " + ", ".join(str(path) for _, path in sorted(files.items())))
