"""Adds to a run the readings at the moment it ran out of memory, from its OOM records."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trainer_plugins.record.history import History, Run
from trainer_plugins.record.oom_record import OomRecord, read_oom_records
from trainer_plugins.record.timeline import Failure

SLACK_SECONDS = 1.0
"""How far the clocks of ranks may be apart."""


def with_last_readings(history: History, folder: Path) -> History:
    """Add the readings at an out-of-memory error to each run of a folder."""
    records = read_oom_records(folder)
    runs = [with_records(run, records_of(run, records)) for run in history.runs]
    return replace(history, runs=runs)


def records_of(run: Run, records: Sequence[OomRecord]) -> list[OomRecord]:
    """Return the records of the ranks that ran out of memory in a run, the first one first."""
    began, ended = run.seconds
    return [
        each
        for each in records
        if began - SLACK_SECONDS <= each.time_seconds <= ended + SLACK_SECONDS
        and any(isinstance(entry, Failure) for entry in run.timelines.get(each.rank, ()))
    ]


def with_records(run: Run, records: Sequence[OomRecord]) -> Run:
    """Give each out-of-memory error its own time, and add the reading at that time.

    The timeline notes it later, after all live tensors have been counted.
    """
    timelines = {rank: [*entries] for rank, entries in run.timelines.items()}
    for record in records:
        entries = timelines[record.rank]
        for at, entry in enumerate(entries):
            if isinstance(entry, Failure) and entry.record:
                entries[at] = replace(entry, time_seconds=record.time_seconds)
                if record.last_sample is not None:
                    entries.insert(at, record.last_sample)
                break
    return Run(timelines)
