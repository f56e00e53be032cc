"""Render the runs of a folder as one page: the last one in full, the others in a table."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from trainer_plugins.explain.answer import GRADES, Explanation
from trainer_plugins.explain.run import explain_run
from trainer_plugins.explain.run.ending import judge_ending
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.planner.calibrate import differences_of, peaks_as_seen, refuse_another_run
from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.printable import printable
from trainer_plugins.record.history import History, Run, entries_of, read_history
from trainer_plugins.record.oom_record import OomRecord
from trainer_plugins.record.run_facts import read_run_facts
from trainer_plugins.record.timeline import Remark
from trainer_plugins.report import summary
from trainer_plugins.report.html.chart import Chart
from trainer_plugins.report.html.events import Duration, Noted, collect_notes
from trainer_plugins.report.html.memory_chart import (
    fullest,
    memory_chart,
    odd_one,
    pace_chart,
    small_chart,
)
from trainer_plugins.report.html.page import Page, page
from trainer_plugins.report.html.plan_page import plan_page
from trainer_plugins.report.html.snapshot_page import snapshot_data
from trainer_plugins.report.text import describe_steps
from trainer_plugins.snapshot.oom import SnapshotCase, case_of
from trainer_plugins.snapshot.pickled import NotReadableError
from trainer_plugins.units import percent, size

_POSITIONS = re.compile(r"(?:\[\d+\])+")  # these differ from tensor to tensor
_SHOWN_FRACTION = 0.005  # smaller parts of the live memory are not listed


def run_page(
    history: History,
    folder: Path,
    ending: Finding | None = None,
    plan: MemoryPlan | None = None,
    predicts: bool = False,
) -> Page:
    """Render the last run of a folder; `ending` says how it ended, if its timeline does not."""
    if not history.runs:
        raise ValueError(f"{printable(folder)}: the timelines have no entries, nothing to draw")
    run = history.runs[-1]
    if plan is not None:
        refuse_another_run(plan, run.timelines, "the plan")
    records = summary.records_of(run, folder)
    record = records[0] if records else None
    run = summary.add_records(run, records)
    failures = summary.failures_of(run.timelines)
    died = ending is not None or any(failure.record for _, failure in failures)
    answer = explain_run(folder, predicts) if died else None
    began, ended = run.seconds
    during = Duration(began_seconds=began, seconds=max(ended - began, 1e-3))
    noted = collect_notes(run.timelines)
    alive, held = _alive_and_held(record, noted)
    rank = _rank_in_full(run, record)
    entries = run.timelines[rank]
    memory = memory_chart(rank, entries, during, noted, _read_planned_peaks(plan))
    pace = pace_chart(rank, entries, during, _num_rows_a_step(run, folder))
    differences = [] if plan is None else differences_of(plan, run.timelines)
    ranks = _small(run, during)
    case = _case(record, folder)
    charts = filter(None, (memory, pace, *ranks))
    snapshots = [] if case is None else [snapshot_data(case, "What torch's snapshot holds")]
    return page(
        "run.html.jinja",
        {"charts": {each.name: asdict(each) for each in charts}, "snapshots": snapshots},
        folder=folder,
        verdict=verdict(run, answer, ending),
        is_bad=ending is not None or bool(failures),
        lede=_lede(record),
        when=describe_steps(run),
        strategies=[*summary.strategies_of(run.timelines), *summary.places_of(run)],
        answer=answer,
        grades=GRADES,
        memory=memory,
        failures=[failure for each, failure in failures if each == rank],
        pace=pace,
        ranks=ranks,
        odd_one=odd_one(run.timelines),
        beside=[each for each in differences if each.counter != "card"],
        record=record,
        alive=alive,
        held=held,
        has_snapshot=case is not None,
        noted=noted,
        peaks=_peaks(run),
        earlier=[*_earlier(history)],
        passed_over={rank: num for rank, num in history.num_passed_over.items() if num},
        files=[*history.files.values()],
    )


def draw(what: MemoryPlan | str | Path, plan: MemoryPlan | None = None) -> Page:
    """Draw a plan, or the memory of the last run of a folder.

    A notebook shows the page if it is the last value of a cell. It is also a str that you can write
    to a file.

    Args:
        what: a plan, or the output_dir of a run that had MemoryWatchdog.
        plan: the prediction for the run.

    Raises:
        ValueError: the folder has no timeline, or the timeline is empty.
        OSError: a file cannot be read.
    """
    if isinstance(what, MemoryPlan):
        return plan_page(what)
    folder = Path(what)
    history = read_history(folder)
    return run_page(history, folder, judge_ending(history, folder), plan)


def verdict(run: Run, answer: Explanation | None, ending: Finding | None) -> str:
    """Say in one line how a run went."""
    failures = summary.failures_of(run.timelines)
    cause = answer.causes[0].summary if answer is not None and answer.causes else ""
    if failures:
        _, first = failures[0]
        what = "Out of memory" if first.record else f"Failed ({first.words.partition(':')[0]})"
        return f"{what} after step {first.step}" + (f": {cause}" if cause else "")
    if ending is not None:
        return ending.summary[:1].upper() + ending.summary[1:]
    top = fullest(chain.from_iterable(run.timelines.values()))
    if top is None:
        return "The run left no reading of its memory"
    findings = [remark.finding for _, remark in entries_of(run.timelines, Remark)]
    worst = max((each.severity for each in findings), default=Severity.INFO)
    but = {Severity.ERROR: ", with errors", Severity.WARNING: ", with warnings"}.get(worst, "")
    full = percent(top.reading.pressure)
    num = sum(each.code == "out-of-memory-survived" for each in findings)
    saved = f". {num} batch{'es' * (num > 1)} ran out of memory and survived" if num else ""
    place = f"in step {top.step} ({top.moment})"
    return f"{top.reading.device} was {full} full at most, {place}{but}{saved}"


def _read_planned_peaks(plan: MemoryPlan | None) -> dict[str, int]:
    if plan is None:
        return {}
    seen = peaks_as_seen(plan).items()
    return {moment: peak.allocated_bytes + plan.context_bytes for moment, peak in seen}


def _num_rows_a_step(run: Run, folder: Path) -> int:
    began, ended = run.seconds
    of_run = [
        each.num_rows_a_step
        for each in read_run_facts(folder)
        if began - summary.SLACK_SECONDS <= each.time_seconds <= ended
    ]
    return of_run[-1] if of_run else 0


def _rank_in_full(run: Run, record: OomRecord | None) -> int:
    """Choose the rank that failed, else the one with the fullest card."""
    if record is not None:
        return record.rank
    tops = {rank: fullest(entries) for rank, entries in run.timelines.items()}
    return max(tops, key=lambda rank: top.reading.pressure if (top := tops[rank]) else -1.0)


def _lede(record: OomRecord | None) -> str:
    """Give the figures of the failed allocation; empty if they are unknown."""
    if record is None or (error := record.error).requested_bytes is None:
        return ""
    free = f" with {size(error.free_bytes)} free" if error.free_bytes is not None else ""
    total = f" of {size(error.total_bytes)}" if error.total_bytes else ""
    return f"{size(error.requested_bytes)} were asked for{free}{total}, in {record.where}."


def _small(run: Run, during: Duration) -> list[Chart]:
    num, ranks = len(run.timelines), run.timelines.items()
    drawn = (small_chart(rank, entries, during, num) for rank, entries in ranks if num > 1)
    return [each for each in drawn if each is not None]


_Rows = list[tuple[str, int, str]]


def _alive_and_held(record: OomRecord | None, noted: Sequence[Noted]) -> tuple[_Rows, _Rows]:
    """Return the live tensors at an OOM by category, and by the module or object holding them."""
    if record is None or record.alive is None:
        return [], []
    alive = record.alive
    by_holder = Counter(alive.module_bytes)
    leak = next((each.finding.data for each in noted if each.finding.code == "leak-tensors"), {})
    leaks_from = str(leak.get("holder", ""))
    if leaks_from:  # the record names only the largest tensors, and none of a graph
        by_holder[leaks_from] += int(leak["held_bytes"])
    for each in alive.largest:
        holder = _POSITIONS.sub("[...]", each.holder)
        if not leaks_from or leaks_from not in holder:
            by_holder[holder] += each.num_bytes
    least = _SHOWN_FRACTION * sum(alive.all_bytes.values())

    def largest(sizes: Mapping[str, int]) -> _Rows:
        rows = sorted(sizes.items(), key=lambda pair: -pair[1])
        return [(name, num_bytes, "") for name, num_bytes in rows if num_bytes >= least][:12]

    return largest(alive.all_bytes), largest(by_holder)


def _case(record: OomRecord | None, folder: Path) -> SnapshotCase | None:
    if record is None or not record.snapshot:
        return None
    try:
        return case_of(folder / Path(record.snapshot).name)
    except (OSError, NotReadableError):
        return None


def _peaks(run: Run) -> list[summary.RankPeaks]:
    return [
        peak for rank, entries in run.timelines.items() for peak in summary.peaks({rank: entries})
    ]


def _earlier(history: History) -> Iterator[tuple[str, str, int]]:
    for run in reversed(history.runs[:-1]):
        peak = max((each.peak_bytes for each in _peaks(run)), default=0)
        yield describe_steps(run), verdict(run, None, None), peak
