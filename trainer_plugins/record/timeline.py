"""Timeline: the readings and events of a run, in order, as one line of JSON per entry."""

import json
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from io import BufferedReader, FileIO
from itertools import islice
from operator import ge
from pathlib import Path
from time import time
from typing import Any, get_args
from weakref import WeakValueDictionary

from trainer_plugins.finding import Finding
from trainer_plugins.printable import printable
from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.folder import folder_of_run, from_json, open_regular, replacing
from trainer_plugins.strategy import Strategy

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 8 << 20  # a longer file is thinned to about two thirds
LONGEST_LINE_BYTES = 1 << 20
_AT_ONCE_BYTES = 1 << 20  # how much of a file is thinned at a time
_YEAR_10000_SECONDS = 253_402_300_800

CUT_OFF = ".cut-off"  # suffix of a file beside the timeline, empty so that it fits on a full disk

# This process's name here: two launches may write into one folder at a time.
PROCESS = os.urandom(4).hex()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A reading, and when in the run it was taken."""

    step: int  # optimizer steps completed, as `TrainerState.global_step` counts them
    # A `generate` belongs to the moment that follows it; earlier versions' timelines have none.
    moment: str  # one of `train`, `eval`, `predict`, `generate`, `save`, `begin`, `end`
    reading: MemoryReading
    time_seconds: float = field(default_factory=time)  # seconds since the Unix epoch
    num_tokens_seen: int = 0  # by `TrainerState`, on all ranks; 0 if it does not count
    num_readings: int = 1  # itself, thinned neighbours, or all of a moment's `generate`


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """One release of cached memory: the bytes it freed and its cost."""

    step: int
    reason: str
    released_bytes: int
    stuck_bytes: int  # still cached afterwards, in segments with live tensors
    seconds: float  # time that training waited for it
    time_seconds: float = field(default_factory=time)
    num_releases: int = 1  # number of releases summed here


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """A finding and its step."""

    step: int
    finding: Finding
    time_seconds: float = field(default_factory=time)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Training began or resumed here, with this strategy."""

    step: int
    strategy: Strategy
    host: str = ""  # the machine's name; empty in earlier versions' timelines
    job: str = ""  # the scheduler's job, such as `Slurm 4242`; empty without one
    time_seconds: float = field(default_factory=time)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """`train()`, `evaluate()` or `predict()` raised an error."""

    step: int
    words: str  # class of the error and the first line of its message
    record: str = ""  # path of the out-of-memory record; empty for other errors
    num_oom_kills: int = 0  # kills of the container's processes for lack of memory, so far
    host: str = ""  # the machine's name
    time_seconds: float = field(default_factory=time)


Entry = Sample | Flush | Remark | Beginning | Failure


def to_line(entry: Entry, process: str = PROCESS) -> str:
    """Format an entry as one line of JSON, without the line feed; `run` names the process."""
    record: dict[str, object] = {
        "kind": type(entry).__name__.lower(),
        "run": process,
        "time_seconds": round(entry.time_seconds, 3),
        "step": entry.step,
    }
    for name, value in _values(entry).items():
        if name in _PARTS:
            record |= _values(value)
        elif name == "seconds":
            record[name] = round(value, 6)
        elif name not in record and value != _USUAL.get(name):
            record[name] = value
    return json.dumps(record)


_KINDS: Mapping[str, Callable[..., Entry]] = {
    kind.__name__.lower(): kind for kind in get_args(Entry)
}
_PARTS = ("reading", "finding", "strategy")  # their fields are in the line itself
_USUAL = {"num_tokens_seen": 0, "num_readings": 1}  # left out, as most lines are readings


def _values(part: Any) -> dict[str, Any]:
    # `dataclasses.asdict` copies each value, which takes longer than all else at a step.
    return {each.name: getattr(part, each.name) for each in fields(part)}


def from_line(line: bytes) -> tuple[str, Entry] | None:
    """Parse a line's process ("" in old files) and entry; None if damaged or of a later version."""
    try:
        record = json.loads(line.decode())
        entry = from_json(_KINDS[record["kind"]], record | dict.fromkeys(_PARTS, record))
        if entry.step < 0 or not 0 <= entry.time_seconds < _YEAR_10000_SECONDS:
            return None
        return str(record.get("run", "")), entry
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def read_lines(path: Path) -> Iterator[tuple[str, Entry] | None]:
    """Yield the result of `from_line` for each line of a file; a line over 1 MiB is no entry."""
    with BufferedReader(open_regular(path, "r")) as file:
        while line := file.readline(LONGEST_LINE_BYTES):
            if len(line) == LONGEST_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(LONGEST_LINE_BYTES)
                yield None
            elif line.strip():
                yield from_line(line)


def read_timeline(path: Path) -> list[Entry]:
    """Read a file written by a `Timeline`, skipping lines cut off by a kill or a full disk.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    return [read[1] for read in read_lines(path) if read is not None]


def thin(path: Path) -> int:
    """Rewrite a timeline file with fewer lines, and return its size in bytes.

    Of two readings of one moment the higher one stays, and both if one is higher in peak and the
    other in reserved, used or pressure. Releases are summed in pairs. The newest quarter stays. A
    kill at any moment leaves one intact file.
    """
    with BufferedReader(open_regular(path, "r")) as file, replacing(path) as thinned:
        num_old_bytes = os.fstat(file.fileno()).st_size * 3 // 4
        while num_old_bytes > 0 and (lines := file.readlines(min(num_old_bytes, _AT_ONCE_BYTES))):
            num_old_bytes -= sum(map(len, lines))
            thinned.writelines(_thin(lines))
        shutil.copyfileobj(file, thinned)
        shutil.copymode(path, thinned.name)
        thinned.flush()
        os.fsync(thinned.fileno())
        return thinned.tell()


def _thin(lines: Sequence[bytes]) -> Iterator[bytes]:
    stay: list[bytes | None] = [*lines]
    unpaired: dict[object, tuple[int, Sample | Flush]] = {}
    for number, line in enumerate(lines):
        process, entry = from_line(line) or ("", None)  # a line that cannot be read stays
        key: tuple[object, ...]
        match entry:
            case Beginning() | Sample(moment="begin"):
                unpaired.clear()  # never compare readings of two runs
                continue
            case Sample(moment=moment, reading=reading) if moment != "end":
                key = process, moment, reading.device, reading.total_bytes
            case Flush(reason=reason):
                key = process, reason
            case _:
                continue
        at, before = unpaired.pop(key, (number, entry))
        is_pair = at < number and before.step <= entry.step
        joined = _join(before, entry) if is_pair else None
        if joined is not None:
            stay[at] = stay[number] = None
            place = number if joined.step == entry.step else at
            stay[place] = to_line(joined, process).encode() + b"\n"
        elif not is_pair:
            unpaired[key] = number, entry
    return (line for line in stay if line is not None)


def _join(one: Sample | Flush, other: Sample | Flush) -> Sample | Flush | None:
    """Return the sum of two releases, or the higher reading; None if both are highest."""
    if isinstance(one, Flush) and isinstance(other, Flush):
        return replace(
            other,
            released_bytes=one.released_bytes + other.released_bytes,
            seconds=one.seconds + other.seconds,
            stuck_bytes=max(one.stuck_bytes, other.stuck_bytes),
            num_releases=one.num_releases + other.num_releases,
        )
    assert isinstance(one, Sample)
    assert isinstance(other, Sample)
    for high, low in ((other, one), (one, other)):
        if all(map(ge, _figures(high.reading), _figures(low.reading))):
            return replace(high, num_readings=one.num_readings + other.num_readings)
    return None


def _figures(reading: MemoryReading) -> tuple[float, ...]:
    used_bytes = reading.total_bytes - reading.free_bytes
    return reading.peak_allocated_bytes, reading.reserved_bytes, used_bytes, reading.pressure


class Timeline:
    """Keeps the last `capacity` entries, oldest first; with a `path`, also appends each to a file.

    A failed write is logged once and never raised; entries are written once there is room again. A
    removed file is recreated, and one over `MAX_FILE_BYTES` is thinned.
    """

    def __init__(self, path: Path | None = None, capacity: int = 10_000) -> None:
        self._file: FileIO | None = None
        if capacity < 1:
            raise ValueError(f"a timeline keeps at least one entry, got capacity={capacity}")
        self.path = path
        self.last_flush: Flush | None = None
        self.num_added = 0
        self._entries: deque[Entry] = deque(maxlen=capacity)
        self._unwritten: deque[bytes] = deque(maxlen=capacity)
        self._num_taken = 0  # bytes written of the first unwritten line: a full disk may split one
        self._thin_from_bytes = MAX_FILE_BYTES
        self._logged: set[str] = set()
        self._may_be_cut_off = True  # by an earlier process
        self.listener: Callable[[Entry], None] | None = None  # receives new entries

    def add(self, entry: Entry) -> None:
        self._entries.append(entry)
        self.num_added += 1
        if isinstance(entry, Flush):
            self.last_flush = entry
        if self.path is not None:
            if self._num_taken and len(self._unwritten) == self._unwritten.maxlen:
                self.close()  # the rest of that line is lost
            self._unwritten.append(to_line(entry).encode() + b"\n")
            self._write(self.path)
        if self.listener is not None:
            self.listener(entry)

    def since(self, num_added: int) -> list[Entry]:
        """Return the entries added after the first `num_added`, as far as they are in memory."""
        return list(islice(reversed(self._entries), self.num_added - num_added))[::-1]

    def close(self) -> None:
        """Close the file; a later entry reopens it and appends to it."""
        self._num_taken = 0
        if self._file is not None:
            self._file.close()
            self._file = None

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __getstate__(self) -> dict[str, object]:
        """Return the state without the open file: each copy opens its own."""
        return {
            **self.__dict__,
            "_file": None,
            "listener": None,
            "_num_taken": 0,
            "_unwritten": deque(maxlen=self._unwritten.maxlen),
        }

    def _write(self, path: Path) -> None:
        try:
            file = self._file_now(path)
            while self._unwritten:
                line = self._unwritten[0]
                self._num_taken += file.write(line[self._num_taken :])
                if self._num_taken == len(line):
                    self._unwritten.popleft()
                    self._num_taken = 0
            if self._may_be_cut_off:
                path.with_suffix(CUT_OFF).unlink(missing_ok=True)
                self._may_be_cut_off = False
        except OSError as error:
            self._may_be_cut_off = True
            with suppress(OSError):
                path.with_suffix(CUT_OFF).touch()
            self._warn_once(
                "the memory timeline could not be written to %s (%s): training continues, and"
                " the entries stay in memory until they can be. Free some space, or set"
                " output_dir to a writable folder",
                printable(path),
                error.strerror,
            )

    def _file_now(self, path: Path) -> FileIO:
        """Return the file at the path now: it may have been removed or replaced."""
        try:
            found = os.stat(path)
        except FileNotFoundError:
            found = None
        home = None if self._file is None else os.fstat(self._file.fileno())
        if home is not None and (found is None or not os.path.samestat(found, home)):
            self.close()
            if found is None:
                self._warn_once(
                    "the memory timeline %s was removed while the run was writing it: it was"
                    " created again, without its earlier entries. Leave output_dir in place until"
                    " the run has ended",
                    printable(path),
                )
        if found is not None and found.st_size > self._thin_from_bytes:
            self._thin(path, found.st_size)
        if self._file is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open_regular(path, "a+")
            if os.fstat(file.fileno()).st_size:
                file.seek(-1, os.SEEK_END)
                # Half a line, from a killed run or a full disk.
                if file.read(1) != b"\n":
                    file.write(b"\n")
            self._file = file  # closes itself when deleted, even when Python ends
        return self._file

    def _thin(self, path: Path, num_bytes: int) -> None:
        self.close()
        try:
            num_bytes = thin(Path(os.path.realpath(path)))
        except OSError as error:
            self._warn_once(
                "the memory timeline %s has %d bytes and could not be thinned (%s): it will"
                " keep growing. Free some space",
                printable(path),
                num_bytes,
                error.strerror,
            )
        # If little or nothing could be dropped, try again when the file has grown by half.
        self._thin_from_bytes = max(MAX_FILE_BYTES, num_bytes * 3 // 2)

    def _warn_once(self, message: str, *values: object) -> None:
        if message not in self._logged:
            self._logged.add(message)
            logger.warning(message, *values)


# The callbacks of a process share a file's Timeline: two would have half the history each.
_open_timelines: WeakValueDictionary[Path, Timeline] = WeakValueDictionary()


def timeline_of_run(output_dir: str, rank: int) -> Timeline:
    """Return the only timeline of a run's rank: `memory/rank-<rank>.jsonl` in our folder."""
    path = folder_of_run(Path(output_dir).absolute()) / "memory" / f"rank-{rank}.jsonl"
    timeline = _open_timelines.get(path)
    if timeline is None:
        timeline = _open_timelines[path] = Timeline(path)
    return timeline
