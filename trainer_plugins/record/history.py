"""History: the runs that wrote into one folder, read afterwards or while they continue."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple, TypeVar

from trainer_plugins.printable import printable
from trainer_plugins.record.folder import GONE, NAME, open_regular, place_of_run
from trainer_plugins.record.timeline import (
    CUT_OFF,
    LONGEST_LINE_BYTES,
    Beginning,
    Entry,
    Failure,
    Flush,
    Remark,
    Sample,
    from_line,
    read_lines,
)

_APART_SECONDS = 10.0  # between ranks of a launch that each die before training
Kind = TypeVar("Kind", Sample, Flush, Remark, Beginning, Failure)
Timelines = Mapping[int, Sequence[Entry]]  # by rank; one or more, each with an entry


class Run(NamedTuple):
    """One run: a training with the evaluations around it, or evaluations alone."""

    timelines: Timelines
    is_part: bool = False  # ranks were left out on purpose

    @property
    def steps(self) -> tuple[int, int]:
        """Return the optimizer steps completed before the run and at its end."""
        first = min(entries[0].step for entries in self.timelines.values())
        return first, max(entry.step for entry in self._entries())

    @property
    def seconds(self) -> tuple[float, float]:
        """Return the times of the first and last entry, in seconds since the Unix epoch."""
        times = [entry.time_seconds for entry in self._entries()]
        return min(times), max(times)

    @property
    def hosts(self) -> dict[int, str]:
        """Return the machine name of each rank, where known."""
        began = {rank: entry.host for rank, entry in entries_of(self.timelines, Beginning)}
        failed = {rank: entry.host for rank, entry in entries_of(self.timelines, Failure)}
        return {rank: host for rank, host in {**failed, **began}.items() if host}

    @property
    def jobs(self) -> list[str]:
        """Return the scheduler's jobs of the run; a resumed run may have several."""
        return [*dict.fromkeys(e.job for _, e in entries_of(self.timelines, Beginning) if e.job)]

    @property
    def missing_ranks(self) -> list[int]:
        """Return the ranks of the last strategy that wrote nothing here."""
        num = 0 if self.is_part else self.world_size
        return sorted({*range(num)} - {*self.timelines})

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the last strategy; 0 if unknown."""
        sizes = [e.strategy.world_size for _, e in entries_of(self.timelines, Beginning)]
        return sizes[-1] if sizes else 0

    @property
    def silent_ranks(self) -> list[int]:  # they recorded neither the end of training nor an error
        lines = sorted(self.timelines.items())
        return [rank for rank, each in lines if not has_end(each) and not has_failed(each)]

    def _entries(self) -> Iterable[Entry]:
        return (entry for entries in self.timelines.values() for entry in entries)


class History(NamedTuple):
    """All runs that wrote into a folder."""

    runs: Sequence[Run]  # oldest first
    files: Mapping[int, Path]  # the timeline files, by rank
    num_passed_over: Mapping[int, int]  # unreadable lines: cut off, damaged, later
    cut_off: frozenset[int] = frozenset()  # ranks whose last entries did not fit on the disk

    def select_rank(self, rank: int) -> "History":
        """Return the history of one rank. Raises ValueError if it has no file."""
        if rank not in self.files:
            known = ", ".join(map(str, self.files))
            raise ValueError(f"rank {rank} wrote nothing here; ranks with a file: {known}")
        return History(
            [
                Run({rank: run.timelines[rank]}, is_part=True)
                for run in self.runs
                if rank in run.timelines
            ],
            {rank: self.files[rank]},
            {rank: self.num_passed_over[rank]},
            self.cut_off & {rank},
        )


def ranks_in_words(ranks: Collection[int]) -> str:
    """Name ranks briefly, however many there are.

    >>> ranks_in_words((0,)), ranks_in_words((0, 1, 2, 3)), ranks_in_words((0, 2, 7))
    ('rank 0', 'ranks 0 to 3', '3 ranks of 0 to 7')
    """
    first, last = min(ranks), max(ranks)
    if first == last:
        return f"rank {first}"
    many = "ranks" if len(ranks) == last - first + 1 else f"{len(ranks)} ranks of"
    return f"{many} {first} to {last}"


def missing_in_words(run: Run) -> str:
    """Report the ranks that wrote nothing here, and how to collect their files."""
    return (
        f"{ranks_in_words(run.missing_ranks)} wrote nothing here. If each machine has an output_dir"
        f" of its own, copy the folder {NAME} of each into one output_dir: no two have a file of"
        " the same name"
    )


def entries_of(timelines: Timelines, kind: type[Kind]) -> Iterator[tuple[int, Kind]]:
    """Yield the entries of one kind with their rank, rank by rank."""
    for rank, entries in sorted(timelines.items()):
        for entry in entries:
            if isinstance(entry, kind):
                yield rank, entry


def has_end(entries: Iterable[Entry]) -> bool:
    """Return whether a rank recorded the end of its training, or never began one."""
    moments = {entry.moment for entry in entries if isinstance(entry, Sample)}
    began = any(isinstance(entry, Beginning) for entry in entries)
    return "end" in moments or not (began or moments & {"begin", "train"})


def has_failed(entries: Iterable[Entry]) -> bool:
    """Return whether a rank recorded an error."""
    return any(isinstance(entry, Failure) for entry in entries)


def read_history(run_dir: Path) -> History:
    """Read the timelines of all ranks of a folder. Raises ValueError if there are none."""
    files = rank_files(run_dir)
    if not files:
        raise ValueError(
            f"{printable(run_dir)} has no memory/rank-*.jsonl: give the output_dir of a run that"
            " had MemoryWatchdog"
        )
    found: list[tuple[int, list[Entry]]] = []
    num_passed_over: dict[int, int] = {}
    for rank, path in files.items():
        runs, lines = RankRuns(), [*read_lines(path)]
        num_passed_over[rank] = lines.count(None)
        for line in lines:
            if line is not None:
                runs.add(*line)
        found += [(rank, run) for run in runs.all]
    cut_off = {rank for rank, path in files.items() if path.with_suffix(CUT_OFF).exists()}
    return History(_join_by_time(found), files, num_passed_over, frozenset(cut_off))


def rank_files(run_dir: Path, suffix: str = ".jsonl") -> dict[int, Path]:
    """Return the timeline files of a folder by rank, in order."""
    paths = place_of_run(run_dir).glob(f"memory/rank-*{suffix}")
    found = ((re.fullmatch(r"rank-(0|[1-9][0-9]*)", path.stem), path) for path in paths)
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def first_that_ended(run_dir: Path, since_seconds: float) -> int | None:
    """Return the rank whose process ended first, as recorded by another rank; None if none did."""
    gone = rank_files(run_dir, GONE).items()
    found = [(path.stat().st_mtime, rank) for rank, path in gone]
    return min((rank for rank in found if rank[0] >= since_seconds), default=(0, None))[1]


class RankRuns:
    """Divides the entries of one rank into runs, as they come: within a run steps never decrease.

    Each process has its own runs.
    """

    def __init__(self) -> None:
        self.all: list[list[Entry]] = []
        self._latest: dict[str, tuple[list[Entry], set[type[Entry]]]] = {}

    def add(self, process: str, entry: Entry) -> None:
        run, seen = self._latest.get(process, ([], set()))
        begins = isinstance(entry, Sample) and entry.moment == "begin"
        is_beginning = begins or isinstance(entry, Beginning)
        is_repeated = is_beginning and not seen.isdisjoint({type(entry), Flush})
        if not run or entry.step < run[-1].step or is_repeated:
            run, seen = [], set()
            self.all.append(run)
            self._latest[process] = run, seen
        if is_beginning:
            seen.add(type(entry))
        elif isinstance(entry, (Flush, Sample)):
            seen.add(Flush)  # it is under way: a second beginning is another run's
        run.append(entry)


def _join_by_time(found: Iterable[tuple[int, list[Entry]]]) -> list[Run]:
    """Join runs of single ranks that overlap in time, or nearly."""
    joined: list[dict[int, list[Entry]]] = []
    last_seconds = 0.0
    for rank, run in sorted(found, key=lambda pair: pair[1][0].time_seconds):
        began, ended = run[0].time_seconds, run[-1].time_seconds
        if not joined or rank in joined[-1] or began > last_seconds + _APART_SECONDS:
            joined.append({})
            last_seconds = 0.0
        joined[-1][rank] = run
        last_seconds = max(last_seconds, ended)
    return [Run(dict(sorted(each.items()))) for each in joined]


def _follow(path: Path) -> Iterator[RankRuns]:
    """Yield the runs of one rank, each time with the new lines; an incomplete one waits.

    If its last line is not where it was, the file was thinned or recreated, and is read again from
    the start; inode numbers would not show that.
    """
    runs, offset, last_line = RankRuns(), 0, b""
    while True:
        # It may be removed after it was listed.
        with suppress(FileNotFoundError), BufferedReader(open_regular(path, "r")) as file:
            file.seek(offset - len(last_line))
            if file.read(len(last_line)) != last_line:
                file.seek(0)
                runs, offset, last_line = RankRuns(), 0, b""
            while line := file.readline(LONGEST_LINE_BYTES):
                if not line.endswith(b"\n") and len(line) < LONGEST_LINE_BYTES:
                    break
                offset += len(line)
                last_line = line
                if read := from_line(line):
                    runs.add(*read)
        yield runs


def follow(run_dir: Path) -> Iterator[Run | None]:
    """Yield the last run of a folder, each time with its new entries; None before it has begun.

    The timelines may appear later or be replaced.
    """
    files: dict[int, Iterator[RankRuns]] = {}
    while True:
        paths = rank_files(run_dir)
        files = {rank: files.get(rank) or _follow(path) for rank, path in paths.items()}
        found = [(rank, run) for rank, file in files.items() for run in next(file).all]
        yield _join_by_time(found)[-1] if found else None
