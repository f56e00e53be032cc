"""Draws a plan, or the last run of a folder, as a page that a notebook shows."""

from pathlib import Path

from trainer_plugins.explain.run.ending import how_it_ended
from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.record.history import read_history
from trainer_plugins.report.html.page import Page
from trainer_plugins.report.html.plan_page import plan_page
from trainer_plugins.report.html.run_page import run_page


def draw(what: MemoryPlan | str | Path, plan: MemoryPlan | None = None) -> Page:
    """Draw a plan, or the memory of the last run of a folder.

    A notebook shows the page if it is the last value of a cell. It is also a str that can be
    written to a file.

    Args:
        what: a plan, or the output_dir of a run that had MemoryWatchdog.
        plan: what was predicted for the run.

    Raises:
        ValueError: the folder has no timeline, or the timeline is empty.
        OSError: a file cannot be read.
    """
    if isinstance(what, MemoryPlan):
        return plan_page(what)
    folder = Path(what)
    history = read_history(folder)
    return run_page(history, folder, how_it_ended(history, folder), plan)
