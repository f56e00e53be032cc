"""Summarise the timelines of a run: the peak of each moment, releases, each finding once."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from trainer_plugins.finding import Finding
from trainer_plugins.record.history import (
    History,
    Run,
    Timelines,
    entries_of,
    has_end,
    has_failed,
    missing_in_words,
    ranks_in_words,
)
from trainer_plugins.record.oom_record import OomRecord, read_oom_records
from trainer_plugins.record.timeline import Beginning, Failure, Flush, Remark, Sample

SLACK_SECONDS = 1.0  # the largest difference between the clocks of ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPeaks:
    """Holds the peak of one moment on the fullest rank, and on the least full one."""

    moment: str
    rank: int  # the fullest rank; the next five describe it
    device: str
    peak_bytes: int
    pressure: float
    total_bytes: int
    reserved_bytes: int
    least_rank: int
    least_pressure: float  # its tensors may take more than the fullest rank's
    least_peak_bytes: int
    num_readings: int  # of all ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Releases:
    """Holds the releases of all ranks, and the time of the rank that waited longest."""

    num: int
    released_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedFinding:
    """Holds the worst of similar findings, and where they occurred."""

    finding: Finding  # the worst of them, by its amount
    times: int
    ranks: tuple[int, ...]
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Summarises one run."""

    steps: tuple[int, int]  # completed before the run, and at its end
    seconds: tuple[float, float]  # since the Unix epoch
    ranks: tuple[int, ...]
    missing_ranks: tuple[int, ...]  # ranks of the strategy that wrote nothing here
    hosts: Mapping[int, str]  # the machine of each rank, if known
    jobs: tuple[str, ...]  # the scheduler's
    has_end: bool  # whether all ranks recorded the end of training
    failures: tuple[Failure, ...]
    failed_ranks: tuple[int, ...]  # the rank of each failure
    peaks: tuple[RankPeaks, ...]
    releases: Releases
    findings: tuple[RepeatedFinding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Summarises all runs of a folder, oldest first."""

    runs: tuple[RunSummary, ...]
    ending: Finding | None  # how the last run ended, if badly
    files: Mapping[int, Path]  # the timeline of each rank
    skipped_lines: Mapping[int, int]  # in each rank's timeline: damaged, or from another program


def summary(history: History, ending: Finding | None) -> Summary:
    """Summarise a folder."""
    return Summary(
        runs=tuple(map(_sum_up, history.runs)),
        ending=ending,
        files=history.files,
        skipped_lines=history.num_passed_over,
    )


def _sum_up(run: Run) -> RunSummary:
    timelines = run.timelines
    failures = [*entries_of(timelines, Failure)]
    return RunSummary(
        steps=run.steps,
        seconds=run.seconds,
        ranks=tuple(timelines),
        missing_ranks=tuple(run.missing_ranks),
        hosts=run.hosts,
        jobs=tuple(run.jobs),
        has_end=all(map(has_end, timelines.values())),
        failures=tuple(failure for _, failure in failures),
        failed_ranks=tuple(rank for rank, _ in failures),
        peaks=tuple(peaks(timelines)),
        releases=releases(timelines),
        findings=tuple(merge_findings(timelines)),
    )


def failures_of(timelines: Timelines) -> list[tuple[int, Failure]]:
    """Return the errors that ended a run, by rank, the first one first."""
    return sorted(entries_of(timelines, Failure), key=lambda pair: pair[1].time_seconds)


def strategies_of(timelines: Timelines) -> list[str]:
    """Name the strategies with which a run began or resumed, once if all ranks agree."""
    began = (entry for _, entry in entries_of(timelines, Beginning))
    return [*dict.fromkeys(f"from step {each.step}: {each.strategy}" for each in began)]


def places_of(run: Run) -> list[str]:
    """Name the job and the machines of a run, and the ranks that wrote elsewhere."""
    hosts: dict[str, list[int]] = {}
    for rank, host in sorted(run.hosts.items()):
        hosts.setdefault(host, []).append(rank)
    places = [f"{ranks_in_words(ranks)} on {host}" for host, ranks in hosts.items()]
    missing = [missing_in_words(run)] if run.missing_ranks else []
    return [", ".join([*run.jobs, *places]), *missing] if places else missing


def steps_in_words(first: int, last: int) -> str:
    """Name one optimizer step, or several in a row."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


def peaks(timelines: Timelines) -> list[RankPeaks]:
    """Return the peak of each moment, in order of appearance."""
    moments: dict[str, dict[int, list[Sample]]] = {}
    for rank, sample in entries_of(timelines, Sample):
        moments.setdefault(sample.moment, {}).setdefault(rank, []).append(sample)
    return [_peak(moment, by_rank) for moment, by_rank in moments.items()]


def _peak(moment: str, by_rank: Mapping[int, Sequence[Sample]]) -> RankPeaks:
    readings = {rank: [each.reading for each in samples] for rank, samples in by_rank.items()}
    highest = {rank: max(some, key=attrgetter("pressure")) for rank, some in readings.items()}
    peak_bytes = {
        rank: max(each.peak_allocated_bytes for each in some) for rank, some in readings.items()
    }
    worst = max(highest, key=lambda rank: highest[rank].pressure)
    least = min(highest, key=lambda rank: highest[rank].pressure)
    return RankPeaks(
        moment=moment,
        rank=worst,
        device=highest[worst].device,
        peak_bytes=peak_bytes[worst],
        pressure=highest[worst].pressure,
        total_bytes=highest[worst].total_bytes,
        # The reading misses a cache released after the peak.
        reserved_bytes=max(peak_bytes[worst], *(each.reserved_bytes for each in readings[worst])),
        least_rank=least,
        least_pressure=highest[least].pressure,
        least_peak_bytes=peak_bytes[least],
        num_readings=sum(each.num_readings for samples in by_rank.values() for each in samples),
    )


def releases(timelines: Timelines) -> Releases:
    """Summarise the releases of cached memory."""
    flushes = [*entries_of(timelines, Flush)]
    seconds = dict.fromkeys(timelines, 0.0)
    for rank, flush in flushes:
        seconds[rank] += flush.seconds
    return Releases(
        num=sum(flush.num_releases for _, flush in flushes),
        released_bytes=sum(flush.released_bytes for _, flush in flushes),
        seconds=max(seconds.values()),
    )


def merge_findings(timelines: Timelines) -> list[RepeatedFinding]:
    """Merge findings that differ only in their figures, the earliest first."""
    same: dict[tuple[str, int, str], list[tuple[int, Remark]]] = {}
    for rank, remark in entries_of(timelines, Remark):
        found = remark.finding
        key = (found.code, found.severity, re.sub(r"\d+(?:[.,]\d+)*", "", found.summary))
        same.setdefault(key, []).append((rank, remark))
    merged = [
        RepeatedFinding(
            finding=max((remark.finding for _, remark in some), key=attrgetter("amount")),
            times=len(some),
            ranks=tuple(sorted({rank for rank, _ in some})),
            first_step=min(remark.step for _, remark in some),
            last_step=max(remark.step for _, remark in some),
        )
        for some in same.values()
    ]
    return sorted(merged, key=attrgetter("first_step"))


def records_of(run: Run, folder: Path) -> list[OomRecord]:
    """Return the records of the ranks that ran out of memory in a run, the first one first."""
    began, ended = run.seconds
    return [
        each
        for each in read_oom_records(folder)
        if began - SLACK_SECONDS <= each.time_seconds <= ended + SLACK_SECONDS
        and has_failed(run.timelines.get(each.rank, ()))
    ]


def add_records(run: Run, records: Sequence[OomRecord]) -> Run:
    """Give each out-of-memory error its own time, and add the reading at that time."""
    timelines = {rank: [*entries] for rank, entries in run.timelines.items()}
    for record in records:
        entries = timelines[record.rank]
        for at, entry in enumerate(entries):
            # The timeline records it later, after all live tensors have been counted.
            if isinstance(entry, Failure) and entry.record:
                entries[at] = replace(entry, time_seconds=record.time_seconds)
                if (reading := record.reading) is not None:
                    step, moment, when = record.step, record.moment, record.time_seconds
                    last = Sample(step=step, moment=moment, reading=reading, time_seconds=when)
                    entries.insert(at, last)
                break
    return run._replace(timelines=timelines)
