"""Follower: reads what ranks add to their timelines, and knows where the last run stands."""

from collections import deque
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

from trainer_plugins.record.history import Course, brought_together, rank_files
from trainer_plugins.record.oom_record import read_oom_record
from trainer_plugins.record.regular_file import open_regular
from trainer_plugins.record.timeline import (
    LONGEST_LINE_BYTES,
    Beginning,
    Entry,
    Failure,
    Remark,
    Sample,
    from_line,
)

NUM_RECENT = 32
"""The number of readings of training steps that are kept: as many as a leak is judged by."""

NUM_PEAKS = 12
"""A run's pressure is kept as at most twice as many maxima."""


class RankRun:
    """Holds where one rank of one run stands; its size does not grow with the run."""

    def __init__(self, first: Entry) -> None:
        self.began_seconds = first.time_seconds
        self.last = first
        self.sample: Sample | None = None
        self.remark: Remark | None = None
        self.failure: Failure | None = None
        self.world_size: int | None = None
        self.num_trained = 0
        """Readings of training steps so far."""

        self.recent: deque[Sample] = deque(maxlen=NUM_RECENT)
        """The last of these readings, oldest first."""

        self.peaks: list[float] = []
        """The highest pressure of equal stretches of the run, oldest first."""

        self._stretch = 1
        self._num_in_stretch = 0

    def add(self, entry: Entry) -> None:
        """Take the next entry."""
        self.last = entry
        if isinstance(entry, Sample):
            self.sample = entry
            self._note_peak(entry.reading.pressure, entry.num_readings)
            if entry.moment == "train":
                self.num_trained += entry.num_readings
                self.recent.append(entry)
        elif isinstance(entry, Remark):
            self.remark = entry
        elif isinstance(entry, Failure):
            self.failure = entry
        elif isinstance(entry, Beginning):
            self.world_size = entry.strategy.world_size

    def _note_peak(self, pressure: float, num_readings: int) -> None:
        if self.peaks and self._num_in_stretch < self._stretch:
            self.peaks[-1] = max(self.peaks[-1], pressure)
            self._num_in_stretch += num_readings
            return
        if len(self.peaks) == 2 * NUM_PEAKS:
            self.peaks = [max(self.peaks[at : at + 2]) for at in range(0, len(self.peaks), 2)]
            self._stretch *= 2
        self.peaks.append(pressure)
        self._num_in_stretch = num_readings


class _RankFile:
    """Reads what is new in the timeline of one rank.

    A file is read anew if what stood before the place reached is not there any more: it was
    thinned, emptied, or removed and created again. Inode numbers would not tell, because a file
    system gives the number of a removed file to the next one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: list[RankRun] = []
        self._processes: dict[str, tuple[Course, RankRun]] = {}
        self._offset = 0
        self._before = b""
        """The last line that was read."""

    def read_on(self) -> None:
        """Read the whole lines that are new; the half of a line waits for its other half.

        Raises:
            OSError: the file cannot be read, or is not a regular file.
        """
        with BufferedReader(open_regular(self.path, "r")) as file:
            file.seek(self._offset - len(self._before))
            if file.read(len(self._before)) != self._before:
                file.seek(0)
                self._offset, self._before = 0, b""
                self.runs, self._processes = [], {}
            while line := file.readline(LONGEST_LINE_BYTES):
                if not line.endswith(b"\n") and len(line) < LONGEST_LINE_BYTES:
                    break
                self._offset += len(line)
                self._before = line
                if read := from_line(line):
                    self._take(*read)

    def _take(self, process: str, entry: Entry) -> None:
        course, run = self._processes.get(process) or (Course(), None)
        if course.begins_anew(entry) or run is None:
            run = RankRun(entry)
            self.runs.append(run)
            self._processes[process] = course, run
        if isinstance(entry, Failure) and entry.record:
            record = read_oom_record(self.path.parent.parent / Path(entry.record).name)
            if record is not None and record.last_sample is not None:
                run.add(record.last_sample)
        run.add(entry)


class Follower:
    """Follows the timelines of a folder, which may be there later, or be replaced."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._files: dict[int, _RankFile] = {}

    def look(self) -> dict[int, RankRun]:
        """Read what is new, and return where each rank of the last run stands; empty before it.

        Raises:
            OSError: a timeline cannot be read, or is not a regular file.
        """
        self._files = {
            rank: self._files.get(rank) or _RankFile(path)
            for rank, path in rank_files(self.run_dir).items()
        }
        for file in self._files.values():
            with suppress(FileNotFoundError):  # removed since it was listed
                file.read_on()
        runs = brought_together(
            (rank, run.began_seconds, run.last.time_seconds, run)
            for rank, file in self._files.items()
            for run in file.runs
        )
        return runs[-1] if runs else {}
