"""Renders the runs of a folder as one page: the last one in full, the others in a table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer_plugins.explain.answer import Explanation
from trainer_plugins.explain.run import explain_run
from trainer_plugins.explain.snapshot.oom import case_of
from trainer_plugins.explain.snapshot.pickled import NotReadableError
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.planner.calibrate import (
    peaks_as_seen,
    readings_in,
    refuse_another_run,
    tells_generation,
)
from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.printable import printable
from trainer_plugins.record.history import History, Run
from trainer_plugins.record.oom_record import OomRecord, read_oom_records
from trainer_plugins.record.run_facts import read_run_facts
from trainer_plugins.record.timeline import Beginning, Entry, Failure, Sample
from trainer_plugins.report.at_oom import records_of, with_records
from trainer_plugins.report.html.chart import Chart
from trainer_plugins.report.html.events import Span, noted_in
from trainer_plugins.report.html.memory import fullest, memory_chart, small_chart
from trainer_plugins.report.html.page import Page, page
from trainer_plugins.report.html.segments import SegmentMap, segment_map
from trainer_plugins.report.html.step_times import pace_chart, rate_chart
from trainer_plugins.report.text import when
from trainer_plugins.report.words import GRADES
from trainer_plugins.units import percent, size

_SLACK_SECONDS = 1.0
"""How far the clocks of ranks may be apart."""

_SHOWN_FRACTION = 0.005
"""What is less of all that was alive is not listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Holds one planned figure and the measured one. Sizes in bytes."""

    moment: str
    counter: str
    planned_bytes: int
    measured_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Holds the highest figures of one moment on one rank. Sizes in bytes."""

    rank: int
    moment: str
    device: str
    num_readings: int
    peak_bytes: int
    pressure: float
    reserved_bytes: int


def run_page(
    history: History,
    folder: Path,
    ending: Finding | None = None,
    plan: MemoryPlan | None = None,
    predicts: bool = False,
) -> Page:
    """Render what happened to memory in the last run of a folder.

    Args:
        history: the runs.
        folder: the output_dir that they wrote into.
        ending: how the last run ended, if it left no word of its own.
        plan: what was predicted for it.
        predicts: whether the planner says what each remedy brings, as in `explain_run`.

    Raises:
        ValueError: no run has left an entry, or the plan is of another run.
    """
    if not history.runs:
        raise ValueError(f"{printable(folder)}: the timelines have no entries, nothing to draw")
    run = history.runs[-1]
    if plan is not None:
        refuse_another_run(plan, run.timelines, "the plan")
    records = records_of(run, read_oom_records(folder))
    record = records[0] if records else None
    died = ending is not None or any(failure.record for _, failure in failures_of(run))
    answer = explain_run(folder, predicts) if died else None
    run = with_records(run, records)
    began, ended = run.seconds
    span = Span(began_seconds=began, seconds=max(ended - began, 1e-3))
    noted = noted_in(run.timelines)
    rank = _rank_in_full(run, record)
    entries = run.timelines[rank]
    planned = {} if plan is None else _planned(plan, run.timelines)
    return page(
        "run.html.jinja",
        folder=folder,
        verdict=verdict(run, answer, ending),
        is_bad=ending is not None or bool(failures_of(run)),
        lede=_lede(record),
        when=when(run),
        strategies=_strategies(run),
        answer=answer,
        grades=GRADES,
        rank=rank,
        memory=memory_chart(rank, entries, span, noted, planned),
        pace=pace_chart(rank, entries, span),
        rate=rate_chart(rank, entries, span, _num_rows_a_step(run, folder)),
        ranks=_small(run, span),
        beside=[] if plan is None else [*_beside(plan, run.timelines)],
        record=record,
        alive=[] if record is None else _alive(record),
        held=[] if record is None else _held(record),
        segments=None if record is None else _segments(record, folder),
        noted=noted,
        peaks=[*_peaks(run)],
        earlier=[*_earlier(history)],
        passed_over={rank: num for rank, num in history.num_passed_over.items() if num},
        files=[*history.files.values()],
    )


def verdict(run: Run, answer: Explanation | None, ending: Finding | None) -> str:
    """Say in one line how a run went."""
    failures = failures_of(run)
    cause = answer.causes[0].summary if answer is not None and answer.causes else ""
    if failures:
        _, first = failures[0]
        what = "Out of memory" if first.record else f"Failed ({first.words.partition(':')[0]})"
        return f"{what} after step {first.step}" + (f": {cause}" if cause else "")
    if ending is not None:
        return ending.summary[:1].upper() + ending.summary[1:]
    tops = [top for entries in run.timelines.values() if (top := fullest(entries)) is not None]
    if not tops:
        return "The run left no reading of its memory"
    top = max(tops, key=lambda sample: sample.reading.pressure)
    worst = max((each.finding.severity for each in noted_in(run.timelines)), default=Severity.INFO)
    but = {Severity.ERROR: ", with errors", Severity.WARNING: ", with warnings"}.get(worst, "")
    full = percent(top.reading.pressure)
    return f"{top.reading.device} was {full} full at most, in step {top.step} ({top.moment}){but}"


def failures_of(run: Run) -> list[tuple[int, Failure]]:
    """Return what ended a run, by rank, the first one first."""
    found = [
        (rank, entry)
        for rank, entries in run.timelines.items()
        for entry in entries
        if isinstance(entry, Failure)
    ]
    return sorted(found, key=lambda pair: pair[1].time_seconds)


def _num_rows_a_step(run: Run, folder: Path) -> int:
    """Return the rows of a step as the run wrote it down when it began; 0 if it did not."""
    began, ended = run.seconds
    of_run = [
        each.num_rows_a_step
        for each in read_run_facts(folder)
        if began - _SLACK_SECONDS <= each.time_seconds <= ended
    ]
    return of_run[-1] if of_run else 0


def _rank_in_full(run: Run, record: OomRecord | None) -> int:
    """Choose the rank that failed, else the one whose card was fullest."""
    if record is not None and record.rank in run.timelines:
        return record.rank

    def pressure(rank: int) -> float:
        top = fullest(run.timelines[rank])
        return top.reading.pressure if top is not None else -1.0

    return max(run.timelines, key=pressure)


def _lede(record: OomRecord | None) -> str:
    """Say in numbers what did not fit; empty if nothing is known of that."""
    error = record.error if record is not None else None
    if record is None or error is None or error.requested_bytes is None:
        return ""
    free = f" with {size(error.free_bytes)} free" if error.free_bytes is not None else ""
    total = f" of {size(error.total_bytes)}" if error.total_bytes else ""
    return f"{size(error.requested_bytes)} were asked for{free}{total}, in {record.where}."


def _strategies(run: Run) -> list[str]:
    return [
        *dict.fromkeys(
            f"From step {entry.step}: {entry.strategy}"
            for entries in run.timelines.values()
            for entry in entries
            if isinstance(entry, Beginning)
        )
    ]


def _small(run: Run, span: Span) -> list[Chart]:
    if len(run.timelines) == 1:
        return []
    drawn = (
        small_chart(rank, entries, span, len(run.timelines))
        for rank, entries in run.timelines.items()
    )
    return [each for each in drawn if each is not None]


def _planned(plan: MemoryPlan, timelines: Mapping[int, Sequence[Entry]]) -> dict[str, int]:
    """Return what a plan predicts of the card at the peak of each moment."""
    return {
        moment: peak.allocated_bytes + plan.context_bytes
        for moment, peak in peaks_as_seen(plan, tells_generation(timelines)).items()
    }


def _beside(plan: MemoryPlan, timelines: Mapping[int, Sequence[Entry]]) -> Iterator[Compared]:
    for moment, peak in peaks_as_seen(plan, tells_generation(timelines)).items():
        seen = readings_in(timelines, moment)
        if not seen:
            continue
        for counter, planned, measured in (
            (
                "allocated",
                peak.allocated_bytes,
                max(each.peak_allocated_bytes for each in seen),
            ),
            ("reserved", peak.reserved_bytes, max(each.reserved_bytes for each in seen)),
        ):
            yield Compared(
                moment=moment, counter=counter, planned_bytes=planned, measured_bytes=measured
            )


def _alive(record: OomRecord) -> list[tuple[str, int, str]]:
    """Return what was alive at an OOM by category, the largest first, without what is nothing."""
    alive = record.alive
    if alive is None:
        return []
    found = {**alive.category_bytes, "saved by autograd": alive.hidden_bytes}
    return _worth_showing(found)


def _held(record: OomRecord) -> list[tuple[str, int, str]]:
    """Return what holds memory by module; what no module holds comes by its holder."""
    alive = record.alive
    if alive is None:
        return []
    found = dict(alive.module_bytes)
    for each in alive.largest:
        found[each.holder] = found.get(each.holder, 0) + each.num_bytes
    return _worth_showing(found, sum(alive.category_bytes.values()) + alive.hidden_bytes)


def _worth_showing(
    found: Mapping[str, int], total_bytes: int | None = None
) -> list[tuple[str, int, str]]:
    total = sum(found.values()) if total_bytes is None else total_bytes
    rows = sorted(found.items(), key=lambda pair: -pair[1])
    return [(name, size_, "") for name, size_ in rows if size_ >= _SHOWN_FRACTION * total][:12]


def _segments(record: OomRecord, folder: Path) -> SegmentMap | None:
    """Draw the snapshot that torch took inside the throw; None if there is none to be read."""
    if not record.snapshot:
        return None
    try:
        return segment_map(case_of(folder / Path(record.snapshot).name))
    except (OSError, NotReadableError):
        return None


def _peaks(run: Run) -> Iterator[Peak]:
    for rank, entries in run.timelines.items():
        moments: dict[str, list[Sample]] = {}
        for entry in entries:
            if isinstance(entry, Sample):
                moments.setdefault(entry.moment, []).append(entry)
        for moment, samples in moments.items():
            readings = [sample.reading for sample in samples]
            yield Peak(
                rank=rank,
                moment=moment,
                device=readings[0].device,
                num_readings=sum(sample.num_readings for sample in samples),
                peak_bytes=max(each.peak_allocated_bytes for each in readings),
                pressure=max(each.pressure for each in readings),
                reserved_bytes=max(each.reserved_bytes for each in readings),
            )


def _earlier(history: History) -> Iterator[tuple[str, str, int]]:
    """Return when each earlier run was, how it went, and its highest peak; the newest first."""
    for run in reversed(history.runs[:-1]):
        peak = max((each.peak_bytes for each in _peaks(run)), default=0)
        yield when(run), verdict(run, None, None), peak
