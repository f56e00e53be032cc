"""`trainer-plugins top`: show the memory of a running job, one line per rank."""

import sys
from contextlib import suppress
from pathlib import Path
from time import sleep, time

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from trainer_plugins.cli.as_json import print_json
from trainer_plugins.cli.typed_options import refuse_bad_input, take_as_json, take_run_dir
from trainer_plugins.plug_in.flags import Command
from trainer_plugins.printable import printable
from trainer_plugins.record.history import Run, follow
from trainer_plugins.report.page import show
from trainer_plugins.report.summary import add_records, records_of
from trainer_plugins.report.top_page import TopPage, rank_lines


@click.command(cls=Command)
@take_run_dir
@click.option("--once", is_flag=True, help="Print once and exit.")
@take_as_json
@click.option("--every", default=1.0, metavar="SECONDS", help="Seconds between updates.")
def top(run_dir: Path, once: bool, as_json: bool, every: float) -> None:
    """Show the state of each rank of the last run in a folder, until Ctrl-C.

    It may start before the run, and reads only what the run has written since the last look.

    Example: trainer-plugins top runs/my-run

    Exit codes: 0 shown; 2 nothing to read, or bad input.
    """
    with refuse_bad_input(ValueError):
        if as_json and not once:
            raise ValueError("--json prints a single answer: add --once")
        if not 0.1 <= every <= 3600:
            raise ValueError(f"--every is 0.1 to 3600 seconds, got {every}")
        if not once and not sys.stdout.isatty():
            raise ValueError("standard output is not a terminal: add --once")
        if run_dir.exists() and not run_dir.is_dir():
            raise ValueError(f"{run_dir}: not a folder")
        if once:
            _show_once(run_dir, as_json=as_json)
        else:
            _show_live(run_dir, every)


def _show_once(run_dir: Path, *, as_json: bool) -> None:
    run = next(follow(run_dir))
    if run is None:
        wanted = "name the output_dir of a run that has MemoryWatchdog, after it has started"
        raise ValueError(f"{_nothing_yet(run_dir)}: {wanted}")
    page = _page(run_dir, run)
    if as_json:
        print_json("top", page)
    else:
        show(page)


def _show_live(run_dir: Path, every_seconds: float) -> None:
    console = Console(markup=False, emoji=False, highlight=False)
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        for run in follow(run_dir):
            waits = Text(printable(f"{_nothing_yet(run_dir)}: waiting for the run to start"))
            live.update(_page(run_dir, run) if run else waits, refresh=True)
            sleep(every_seconds)


def _nothing_yet(run_dir: Path) -> str:
    return f"{run_dir} has no entries in memory/rank-*.jsonl"


def _page(run_dir: Path, run: Run) -> TopPage:
    run = add_records(run, records_of(run, run_dir))
    return TopPage(
        run_dir=str(run_dir),
        ranks=rank_lines(run),
        world_size=run.world_size or None,
        now_seconds=time(),
    )
