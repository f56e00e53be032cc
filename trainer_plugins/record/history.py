"""History: the runs that wrote into one folder, told apart by their timelines."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer_plugins.printable import printable
from trainer_plugins.record.timeline import Beginning, Entry, Flush, Sample, read_lines


@dataclass(frozen=True, slots=True)
class Run:
    """Holds one run: a training with the evaluations around it, or evaluations alone.

    A resumed run counts as another run.
    """

    timelines: Mapping[int, Sequence[Entry]]
    """The entries of each rank, by rank; at least one rank, and at least one entry each."""

    @property
    def steps(self) -> tuple[int, int]:
        """Return the optimizer steps that were complete at the run's beginning and at its end."""
        return min(each[0].step for each in self.timelines.values()), max(
            e.step for e in self._entries()
        )

    @property
    def seconds(self) -> tuple[float, float]:
        """Return the times of the first and last entry, in seconds since the Unix epoch."""
        times = [entry.time_seconds for entry in self._entries()]
        return min(times), max(times)

    def _entries(self) -> Iterable[Entry]:
        return (entry for entries in self.timelines.values() for entry in entries)


@dataclass(frozen=True, slots=True)
class History:
    """Holds all runs that wrote into a folder."""

    runs: Sequence[Run]
    """The runs, oldest first."""

    files: Mapping[int, Path]
    """The timeline files, by rank."""

    num_passed_over: Mapping[int, int]
    """Lines that are not entries, by rank: cut off by a kill or a full disk, damaged, or of a later
    version."""


def read_history(run_dir: Path) -> History:
    """Read the timelines of all ranks of a folder.

    Raises:
        ValueError: there are none.
        OSError: a file cannot be read, or is not a regular file.
    """
    found = (
        (re.fullmatch(r"rank-(0|[1-9][0-9]*)\.jsonl", path.name), path)
        for path in run_dir.glob("memory/rank-*")
    )
    files = dict(sorted((int(match[1]), path) for match, path in found if match))
    if not files:
        raise ValueError(
            f"{printable(run_dir)} has no memory/rank-*.jsonl: give the output_dir of a run that"
            " had MemoryWatchdog"
        )
    runs: list[tuple[int, list[Entry]]] = []
    num_passed_over = {}
    for rank, path in files.items():
        lines = [*read_lines(path)]
        num_passed_over[rank] = lines.count(None)
        runs += [(rank, run) for run in _runs_of([line for line in lines if line is not None])]
    return History(_brought_together(runs), files, num_passed_over)


def _runs_of(lines: Iterable[tuple[str, Entry]]) -> list[list[Entry]]:
    """Split the file of one rank into processes, and each process where a new run begins."""
    by_process: dict[str, list[list[Entry]]] = {}
    for process, entry in lines:
        runs = by_process.setdefault(process, [])
        if not runs or _begins_anew(runs[-1], entry):
            runs.append([])
        runs[-1].append(entry)
    return [run for runs in by_process.values() for run in runs]


def _begins_anew(run: Sequence[Entry], entry: Entry) -> bool:
    """Return whether an entry begins a new run.

    Steps only count upwards in a run. Its callbacks note its beginning one after the other, and a
    run does not begin twice.
    """
    if entry.step < run[-1].step:
        return True
    return _is_beginning(entry) and any(
        isinstance(each, Flush)
        or (isinstance(each, Sample) and not _is_beginning(each))
        or (_is_beginning(each) and type(each) is type(entry))
        for each in run
    )


def _is_beginning(entry: Entry) -> bool:
    return isinstance(entry, Beginning) or (isinstance(entry, Sample) and entry.moment == "begin")


def _brought_together(runs: Iterable[tuple[int, list[Entry]]]) -> list[Run]:
    """Join what ranks noted at the same time into one run; no rank is in a run twice."""
    together: list[dict[int, list[Entry]]] = []
    last_seconds = 0.0
    for rank, run in sorted(runs, key=lambda pair: pair[1][0].time_seconds):
        if not together or rank in together[-1] or run[0].time_seconds > last_seconds:
            together.append({})
            last_seconds = 0.0
        together[-1][rank] = run
        last_seconds = max(last_seconds, run[-1].time_seconds)
    return [Run(dict(sorted(each.items()))) for each in together]
