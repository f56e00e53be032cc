"""Thins a long timeline file: keeps its newest quarter and half of the earlier readings."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from trainer_plugins.record.folder import open_regular, replacing

_TOGETHER = 8
_AT_ONCE_BYTES = 1 << 20

# A reading as `timeline.to_line` writes it. All other lines stay.
_READING = re.compile(
    rb'(?P<told>\{"kind": "sample", (?P<run>"run": "\w*", )?"time_seconds": [\d.]+, '
    rb'"step": (?P<step>\d{1,18}), '
    rb'(?P<alike>"moment": "(?!begin"|end")\w+", "device": "[\w:.-]*", '
    rb'"total_bytes": (?P<total>\d{1,18})), '
    rb'"free_bytes": (?P<free>\d{1,18}), "reserved_bytes": (?P<reserved>\d{1,18}), '
    rb'"allocated_bytes": \d{1,18}, '
    rb'"peak_allocated_bytes": (?P<peak>\d{1,18}), "num_alloc_retries": \d{1,18}'
    rb'(?:, "num_tokens_seen": \d{1,18})?)'
    rb'(?:, "num_readings": (?P<num>\d{1,18}))?\}\n'
)
_BEGINNING = re.compile(rb'\{"kind": (?:"beginning"|"sample",.*"moment": "begin")')
_RELEASE = b'{"kind": "flush"'


def thin(path: Path) -> int:
    """Rewrite a timeline file with fewer lines, and return its size in bytes.

    Of every eight readings of one moment, four stay, including the maxima of peak, reserved, used
    and pressure. Releases are summed in pairs. The newest quarter stays. A kill at any moment
    leaves one intact file.
    """
    with BufferedReader(open_regular(path, "r")) as file, replacing(path) as thinned:
        num_old_bytes = os.fstat(file.fileno()).st_size * 3 // 4
        while lines := _lines(file, min(num_old_bytes, _AT_ONCE_BYTES)):
            num_old_bytes -= sum(map(len, lines))
            thinned.writelines(_thin(lines))
        shutil.copyfileobj(file, thinned)
        shutil.copymode(path, thinned.name)
        thinned.flush()
        os.fsync(thinned.fileno())
        return thinned.tell()


def _lines(file: BinaryIO, num_bytes: int) -> list[bytes]:
    """Read lines up to about `num_bytes`; a line over 1 MiB comes in pieces."""
    lines: list[bytes] = []
    while num_bytes > 0 and (line := file.readline(_AT_ONCE_BYTES)):
        lines.append(line)
        num_bytes -= len(line)
    return lines


def _thin(lines: Sequence[bytes]) -> Iterator[bytes]:
    stay: list[bytes | None] = [*lines]
    groups: dict[object, list[tuple[int, re.Match[bytes]]]] = {}
    pending: int | None = None
    for number, line in enumerate(lines):
        if match := _READING.fullmatch(line):
            group = groups.setdefault(match.group("run", "alike"), [])
            if group and int(match["step"]) < int(group[-1][1]["step"]):
                group.clear()
            group.append((number, match))
            if len(group) == _TOGETHER:
                _halve(stay, group)
                group.clear()
        elif line.startswith(_RELEASE):
            if pending is not None and (total := _add(lines[pending], line)):
                stay[pending], stay[number], pending = None, total, None
            else:
                pending = number
        elif _BEGINNING.match(line):
            groups.clear()  # never compare readings of two runs
            pending = None
    return (line for line in stay if line is not None)


def _halve(stay: list[bytes | None], group: Sequence[tuple[int, re.Match[bytes]]]) -> None:
    columns = zip(*(_read_compared(match) for _, match in group), strict=True)
    highest = [max(range(_TOGETHER), key=column.__getitem__) for column in columns]
    wanted = dict.fromkeys([*highest, 7, 5, 3, 1, 6, 4, 2, 0])
    chosen = sorted([*wanted][: _TOGETHER // 2])
    counts = dict.fromkeys(chosen, 0)
    for at, (number, match) in enumerate(group):
        heir = next((each for each in chosen if each >= at), chosen[-1])
        counts[heir] += int(match["num"] or 1)
        stay[number] = None
    for at, num in counts.items():
        number, match = group[at]
        stay[number] = match["told"] + b', "num_readings": %d}\n' % num


def _read_compared(match: re.Match[bytes]) -> tuple[int, ...]:
    """Return peak, reserved, used, and `MemoryReading.pressure` in bytes: a group has one total."""
    total, free, reserved, peak = map(int, match.group("total", "free", "reserved", "peak"))
    return peak, reserved, total - free, peak + max(0, total - free - reserved)


def _add(first: bytes, second: bytes) -> bytes | None:
    """Add two releases, dated as the second; None if they differ in run or reason."""
    try:
        one, other = json.loads(first), json.loads(second)
        is_same_kind = all(one.get(name) == other.get(name) for name in ("run", "reason"))
        if not is_same_kind or one["step"] > other["step"]:
            return None
        for name in ("released_bytes", "seconds"):
            other[name] += one[name]
        other["num_releases"] = one.get("num_releases", 1) + other.get("num_releases", 1)
        other["stuck_bytes"] = max(one["stuck_bytes"], other["stuck_bytes"])
        return json.dumps(other).encode() + b"\n"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
