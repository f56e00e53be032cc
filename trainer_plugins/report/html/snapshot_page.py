"""Render torch's memory snapshots as a page: the holders of memory over time, and remedies."""

from collections.abc import Mapping, Sequence

from trainer_plugins.explain.answer import GRADES, Explanation
from trainer_plugins.printable import printable
from trainer_plugins.report.html.chart import colour_of
from trainer_plugins.report.html.page import Page, page
from trainer_plugins.report.html.snapshot_data import snapshot_data
from trainer_plugins.snapshot.held import WORDS
from trainer_plugins.snapshot.oom import SnapshotCase
from trainer_plugins.units import percent, size

_MOST_LINES = 12


def snapshot_page(answer: Explanation, *cases: SnapshotCase) -> Page:
    """Render one snapshot, or two side by side, with the diagnosis."""
    is_bad = any(case.oom is not None for case in cases)
    cause = answer.causes[0].summary if answer.causes else ""
    shown = [_describe_case(case, len(cases) > 1) for case in cases]
    return page(
        "snapshot.html.jinja",
        {
            "snapshots": [
                snapshot_data(case, str(each["title"]))
                for case, each in zip(cases, shown, strict=True)
            ]
        },
        verdict=_verdict(cases, cause),
        is_bad=is_bad,
        ending=answer.facts[0],
        answer=answer,
        grades=GRADES,
        snapshots=shown,
        colours={WORDS[name]: f"c-{colour_of(name)}" for name in WORDS},
        facts=answer.facts[1:],
    )


def _describe_case(case: SnapshotCase, is_named: bool) -> Mapping[str, object]:
    when = "when it ran out" if case.oom is not None else "at the peak"
    name = f"{printable(case.snapshot.name)}: " if is_named else ""
    return {
        "title": f"{name}{size(case.in_use_bytes)} in use of {size(case.reserved_bytes)} reserved"
        f" {when}",
        "when": f"{when}, in {printable(case.snapshot.name)}" if is_named else when,
        "total": case.in_use_bytes,
        "categories": [(WORDS[name], num, "") for name, num in case.held.categories.items()],
        "lines": [
            (place, num, f"{count:,} block{'' if count == 1 else 's'}")
            for place, num, count in case.held.lines[:_MOST_LINES]
        ],
    }


def _verdict(cases: Sequence[SnapshotCase], cause: str) -> str:
    case = cases[0]
    if len(cases) > 1:
        return cause[:1].upper() + cause[1:] or "The second snapshot holds no more than the first"
    if case.oom is None:
        most, num_bytes = case.largest_category
        share = percent(num_bytes / max(case.in_use_bytes, 1))
        return f"{size(case.in_use_bytes)} in use at the peak, {share} of it {WORDS[most]}"
    return f"Out of memory: {cause}"
