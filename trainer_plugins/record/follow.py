"""Follower: reads what ranks add to their timelines, and knows how far the last run is."""

from collections import deque
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

from trainer_plugins.record.folder import open_regular
from trainer_plugins.record.history import RunSplitter, joined_by_time, rank_files
from trainer_plugins.record.oom_record import read_oom_record
from trainer_plugins.record.timeline import (
    LONGEST_LINE_BYTES,
    Beginning,
    Entry,
    Failure,
    Remark,
    Sample,
    from_line,
)

NUM_RECENT = 32  # readings of training steps that are kept, as many as it takes to judge a leak
NUM_PEAKS = 12  # a run's pressure is kept as at most twice this many maxima


class RankRun:
    """Holds how far one rank of one run is; its size does not grow with the run."""

    def __init__(self, first: Entry) -> None:
        self.began_seconds = first.time_seconds
        self.last = first
        self.sample: Sample | None = None
        self.remark: Remark | None = None
        self.failure: Failure | None = None
        self.world_size: int | None = None
        self.num_trained = 0  # readings of training steps so far
        self.recent: deque[Sample] = deque(maxlen=NUM_RECENT)  # oldest first
        self.peaks: list[float] = []  # the highest pressure of equal stretches, oldest first
        self._stretch = 1
        self._num_in_stretch = 0

    def add(self, entry: Entry) -> None:
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

    If its last line is not in its place, the file was thinned or created again, and is read from
    the start. Inode numbers would not show that: file systems reuse them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: list[RankRun] = []
        self._processes: dict[str, tuple[RunSplitter, RankRun]] = {}
        self._offset = 0
        self._last_line = b""

    def read_on(self) -> None:  # an incomplete line waits for its other half
        with BufferedReader(open_regular(self.path, "r")) as file:
            file.seek(self._offset - len(self._last_line))
            if file.read(len(self._last_line)) != self._last_line:
                file.seek(0)
                self._offset, self._last_line = 0, b""
                self.runs, self._processes = [], {}
            while line := file.readline(LONGEST_LINE_BYTES):
                if not line.endswith(b"\n") and len(line) < LONGEST_LINE_BYTES:
                    break
                self._offset += len(line)
                self._last_line = line
                if read := from_line(line):
                    self._add(*read)

    def _add(self, process: str, entry: Entry) -> None:
        splitter, run = self._processes.get(process) or (RunSplitter(), None)
        if splitter.begins_run(entry) or run is None:
            run = RankRun(entry)
            self.runs.append(run)
            self._processes[process] = splitter, run
        if isinstance(entry, Failure) and entry.record:
            record = read_oom_record(self.path.parent.parent / Path(entry.record).name)
            if record is not None and record.last_sample is not None:
                run.add(record.last_sample)
        run.add(entry)


class Follower:
    """Follows the timelines of a folder, which may appear later or be replaced."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._files: dict[int, _RankFile] = {}

    def look(self) -> dict[int, RankRun]:
        """Read what is new, and return how far each rank of the last run is; empty before it."""
        self._files = {
            rank: self._files.get(rank) or _RankFile(path)
            for rank, path in rank_files(self.run_dir).items()
        }
        for file in self._files.values():
            with suppress(FileNotFoundError):  # removed after it was listed
                file.read_on()
        runs = joined_by_time(
            (rank, run.began_seconds, run.last.time_seconds, run)
            for rank, file in self._files.items()
            for run in file.runs
        )
        return runs[-1] if runs else {}
