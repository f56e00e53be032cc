"""Timeline: what was seen and done during a run, in order; one JSON line an entry, read back the same."""

import json
import logging
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from io import FileIO
from itertools import islice
from pathlib import Path
from time import time
from typing import Any
from weakref import WeakValueDictionary

from trainer_plugins.finding import Finding, Severity
from trainer_plugins.reading import MemoryReading
from trainer_plugins.strategy import Strategy

logger = logging.getLogger(__name__)

# Lines that a full disk refused are kept for when there is room again; this is where we stop keeping them.
MAX_UNWRITTEN_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A reading, and when in the run it was taken."""

    step: int
    """Optimizer steps completed, as in `TrainerState.global_step`."""

    moment: str
    """What the run was doing since the reading before: `train`, `eval`, `predict`, `save`, `begin`, `end`."""

    reading: MemoryReading
    time_seconds: float = field(default_factory=time)
    """Since the epoch of Unix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """One release of cached memory: what it gave and what it cost."""

    step: int
    reason: str
    released_bytes: int
    stuck_bytes: int
    """Still cached afterwards: free parts of segments in which a tensor lives, which no release can give back."""

    seconds: float
    """How long training waited for it."""

    time_seconds: float = field(default_factory=time)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """A finding, and the step at which it was made."""

    step: int
    finding: Finding
    time_seconds: float = field(default_factory=time)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Training began here, or went on from a checkpoint, and as what."""

    step: int
    strategy: Strategy
    time_seconds: float = field(default_factory=time)


Entry = Sample | Flush | Remark | Beginning


def to_line(entry: Entry) -> str:
    """Render an entry as one line of JSON, without the line feed. Sizes stay in bytes."""
    # By hand and not by `dataclasses.asdict`, which copies deeply and costs ten times as much on the training path.
    record: dict[str, Any] = {
        "kind": type(entry).__name__.lower(),
        "time_seconds": round(entry.time_seconds, 3),
        "step": entry.step,
    }
    if isinstance(entry, Sample):
        reading = entry.reading
        record["moment"] = entry.moment
        for name in _READING_FIELDS:
            record[name] = getattr(reading, name)
    elif isinstance(entry, Flush):
        record |= {
            "reason": entry.reason,
            "released_bytes": entry.released_bytes,
            "stuck_bytes": entry.stuck_bytes,
            "seconds": round(entry.seconds, 6),
        }
    else:
        record |= asdict(entry.finding if isinstance(entry, Remark) else entry.strategy)
    return json.dumps(record)


def from_line(line: str) -> Entry | None:
    """Read one line back. None for what is no entry: a kind of a later version, or the half line of a killed run."""
    try:
        record = json.loads(line)
        common = {"time_seconds": record["time_seconds"], "step": record["step"]}
        match record["kind"]:
            case "sample":
                reading = MemoryReading(**{name: record[name] for name in _READING_FIELDS})
                return Sample(moment=record["moment"], reading=reading, **common)
            case "flush":
                names = ("reason", "released_bytes", "stuck_bytes", "seconds")
                return Flush(**{name: record[name] for name in names}, **common)
            case "remark":
                finding = {f.name: record[f.name] for f in fields(Finding)}
                return Remark(finding=Finding(**finding | {"severity": Severity(finding["severity"])}), **common)
            case "beginning":
                return Beginning(strategy=Strategy(**{f.name: record[f.name] for f in fields(Strategy)}), **common)
            case _:
                return None
    except (ValueError, KeyError, TypeError):
        return None


_READING_FIELDS = tuple(f.name for f in fields(MemoryReading))


def read_timeline(path: Path) -> list[Entry]:
    """Read a file that a `Timeline` wrote, also one whose last line was cut off by a kill.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open(encoding="utf-8", errors="replace") as lines:
        return [entry for entry in map(from_line, lines) if entry is not None]


def read_run(run_dir: Path) -> dict[int, list[Entry]]:
    """Read the timelines of a run, by rank.

    Raises:
        ValueError: there are none.
        OSError: a file cannot be read.
    """
    found = ((re.fullmatch(r"rank-(\d+)", path.stem), path) for path in run_dir.glob("memory/rank-*.jsonl"))
    files = {int(match[1]): path for match, path in found if match}
    if not files:
        raise ValueError(f"{run_dir} has no memory/rank-*.jsonl: give the output_dir of a run that had MemoryWatchdog")
    return {rank: read_timeline(path) for rank, path in sorted(files.items())}


class Timeline:
    """A history of entries, oldest first, of which the last `capacity` are kept in memory.

    With a `path` each entry is also appended to that file, one line in one write, so that it survives the death of
    the process. Costs about 20 microseconds an entry. A file that cannot be written is said once and never raised:
    training goes on, the entries stay in memory, and they are written when there is room again.
    """

    def __init__(self, path: Path | None = None, capacity: int = 10_000) -> None:
        self._file: FileIO | None = None
        if capacity < 1:
            raise ValueError(f"a timeline keeps at least one entry, got capacity={capacity}")
        self.path = path
        self.last_flush: Flush | None = None
        self.num_added = 0
        self._entries: deque[Entry] = deque(maxlen=capacity)
        self._unwritten = bytearray()
        self._warned = False

    def add(self, entry: Entry) -> None:
        """Append an entry."""
        self._entries.append(entry)
        self.num_added += 1
        if isinstance(entry, Flush):
            self.last_flush = entry
        if self.path is not None:
            self._unwritten += to_line(entry).encode() + b"\n"
            self._write(self.path)

    def since(self, num_added: int) -> list[Entry]:
        """What was added after `num_added` was that many, oldest first, as far as it is still in memory."""
        return list(islice(reversed(self._entries), self.num_added - num_added))[::-1]

    def close(self) -> None:
        """Close the file. A later entry opens it again and goes on behind the last line."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getstate__(self) -> dict[str, Any]:
        """A copy opens the file for itself, if it has something to add."""
        return {**self.__dict__, "_file": None}

    def _write(self, path: Path) -> None:
        try:
            if self._file is None:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = FileIO(path, "a")  # closes itself when it goes, also at the end of Python
            # A full disk may take half a line: what it took is dropped here, and the next write goes on behind it.
            del self._unwritten[: self._file.write(self._unwritten)]
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "the memory timeline cannot be written to %s (%s): training goes on, and the entries stay in "
                    "memory until they can be. Free some space, or set output_dir to a folder that can be written",
                    path,
                    error.strerror,
                )
            del self._unwritten[:-MAX_UNWRITTEN_BYTES]


# One file has one Timeline in a process, however many callbacks write to it: two would each keep half the history.
_open_timelines: WeakValueDictionary[Path, Timeline] = WeakValueDictionary()


def timeline_of_run(output_dir: str, rank: int) -> Timeline:
    """The timeline of one rank of a run: `<output_dir>/memory/rank-<rank>.jsonl`. The same object for every caller."""
    path = Path(output_dir).absolute() / "memory" / f"rank-{rank}.jsonl"
    timeline = _open_timelines.get(path)
    if timeline is None:
        timeline = _open_timelines[path] = Timeline(path)
    return timeline
