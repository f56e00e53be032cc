"""`trainer-plugins plan --search` and `--explain-change`: make many predictions and one table."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from rich.console import Group

from trainer_plugins.planner.compare.changes import changes_of, explain
from trainer_plugins.planner.compare.search import SearchRequest
from trainer_plugins.planner.plan import PlanError
from trainer_plugins.planner.request import ConfigSource, PlanRequest
from trainer_plugins.planner.run import predict_all, search_run
from trainer_plugins.report.page import show


def search_batches(
    run: PlanRequest, lengths: str | None, timeout_seconds: float, as_json: bool
) -> bool:
    """Print the largest micro-batches that fit, and return whether any does.

    Raises:
        PlanError: the input is wrong, or nothing can be predicted.
    """
    assert isinstance(run.source, ConfigSource)
    asked = _lengths(lengths) if lengths is not None else (run.source.sequence_length,)
    if run.card is None:
        raise PlanError("--search needs a card that the run has to fit on: name one with --gpu")
    result = search_run(SearchRequest(run=run, lengths=asked), timeout_seconds)
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        from trainer_plugins.report.search import search_report

        show(search_report(result))
    return result.best is not None


def explain_changes(
    run: PlanRequest, names: Sequence[str], timeout_seconds: float, as_json: bool
) -> bool | None:
    """Print what switches would save, and return whether the run fits as it is.

    Raises:
        PlanError: there is no such switch, or the run as it is cannot be predicted.
    """
    plan, saved = explain(
        run, changes_of(names), partial(predict_all, timeout_seconds=timeout_seconds)
    )
    if as_json:
        print(
            json.dumps(
                {"plan": asdict(plan), "changes": [asdict(each) for each in saved]}, indent=2
            )
        )
    else:
        from trainer_plugins.report.plan import verdict
        from trainer_plugins.report.search import changes_report

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
