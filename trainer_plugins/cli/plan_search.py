"""`trainer-plugins plan --search` and `--explain-change`: print many predictions in one table."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import typer
from rich.console import Group
from rich.text import Text

from trainer_plugins.cli.as_json import print_json
from trainer_plugins.interrupted import by_any_signal
from trainer_plugins.planner.compare.lines import (
    Interrupted,
    SearchLine,
    SearchRequest,
    SearchResult,
)
from trainer_plugins.planner.compare.saved import (
    ExplainedChanges,
    Saved,
    changes_of,
    explain,
    turned,
)
from trainer_plugins.planner.plan import MemoryPlan, PlanError
from trainer_plugins.planner.predict import predict_all, search_run
from trainer_plugins.planner.request import ConfigSource, PlanRequest
from trainer_plugins.report.page import show
from trainer_plugins.report.plan_text import verdict
from trainer_plugins.report.plans_text import (
    changes_report,
    line_in_words,
    lines_table,
    search_report,
)

_EXIT_INTERRUPTED = 130


def search_batches(
    run: PlanRequest, lengths: str | None, timeout_seconds: float, as_json: bool
) -> bool:
    """Print the largest micro-batches that fit, and return whether there is one."""
    assert isinstance(run.source, ConfigSource)
    asked = _lengths(lengths) if lengths is not None else (run.source.sequence_length,)
    if lengths is not None:
        run = replace(run, source=replace(run.source, has_length=True))
    if run.card is None:
        raise PlanError("--search needs a card that the run has to fit on: name one with --gpu")
    request = SearchRequest(run=run, lengths=asked)
    return show_search(partial(search_run, request, timeout_seconds), as_json)


def show_search(
    find: Callable[[Callable[[SearchLine], None]], SearchResult], as_json: bool
) -> bool:
    """Print what a search finds, each line as it comes, and return whether anything fits."""
    lines: list[SearchLine] = []

    def found(line: SearchLine) -> None:
        lines.append(line)
        print(line_in_words(line), file=sys.stderr, flush=True)

    try:
        with by_any_signal():
            result = find(found)
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


def explain_changes(
    run: PlanRequest, names: Sequence[str], timeout_seconds: float, as_json: bool
) -> bool | None:
    """Print the savings of switches, and return whether the run fits as it is."""
    predict = partial(predict_all, timeout_seconds=timeout_seconds)
    return show_changes(*explain(run, changes_of(names), predict, turned), as_json)


def show_changes(plan: MemoryPlan, saved: tuple[Saved, ...], as_json: bool) -> bool | None:
    """Print what changes save, and return whether the run fits as it is."""
    if as_json:
        print_json("plan --explain-change", ExplainedChanges(plan=plan, changes=saved))
    else:
        show(Group(verdict(plan), changes_report(plan, saved)))
    return plan.fits


def _lengths(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise PlanError(
            f"--search-lengths needs numbers of tokens with commas, as in 1024,2048, got {text!r}"
        )
    return tuple(dict.fromkeys(found))
