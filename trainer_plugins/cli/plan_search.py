"""`trainer-plugins plan --search` and `--explain-change`: print many predictions in one table."""

import sys
from collections.abc import Sequence

import typer
from rich.console import Group
from rich.text import Text

from trainer_plugins.cli.as_json import print_json
from trainer_plugins.drycuda.dry_search import Variations
from trainer_plugins.planner.compare.lines import Interrupted, SearchLine, all_of
from trainer_plugins.planner.compare.saved import ExplainedChanges, Saved
from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.report.page import show
from trainer_plugins.report.plan_text import verdict
from trainer_plugins.report.plans_text import (
    changes_report,
    line_in_words,
    lines_table,
    search_report,
)

_EXIT_INTERRUPTED = 130


def show_search(variations: Sequence[Variations], as_json: bool) -> bool:
    """Print what a search finds, each line as it comes, and return whether anything fits."""
    lines: list[SearchLine] = []

    def show_line(line: SearchLine) -> None:
        lines.append(line)
        print(line_in_words(line), file=sys.stderr, flush=True)

    try:
        result = all_of([each.search(show_line) for each in variations])
    except KeyboardInterrupt:
        _show_so_far(lines, as_json)
        raise typer.Exit(_EXIT_INTERRUPTED) from None
    if as_json:
        print_json("plan --search", result)
    else:
        show(search_report(result))
    return result.best is not None


def _show_so_far(lines: Sequence[SearchLine], as_json: bool) -> None:
    if as_json:
        print_json("plan --search", Interrupted(lines=tuple(lines)))
    elif lines:
        show(Group(Text("Interrupted. Found so far:"), lines_table(lines, None)))
    else:
        show(Text("Interrupted"))


def show_changes(plan: MemoryPlan, saved: tuple[Saved, ...], as_json: bool) -> bool | None:
    """Print what changes save, and return whether the run fits as it is."""
    if as_json:
        print_json("plan --explain-change", ExplainedChanges(plan=plan, changes=saved))
    else:
        show(Group(verdict(plan), changes_report(plan, saved)))
    return plan.fits
