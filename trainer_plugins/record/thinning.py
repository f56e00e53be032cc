"""Thins a long timeline file: keeps its newest quarter and half of the earlier readings."""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from io import BufferedReader
from operator import ge
from pathlib import Path
from typing import Any, BinaryIO

from trainer_plugins.record.folder import open_regular, replacing

_AT_ONCE_BYTES = 1 << 20

# The numbers that a reading and a release need to be thinned. All other lines stay.
_NUMBERS = {
    "sample": ("step", "total_bytes", "free_bytes", "reserved_bytes", "peak_allocated_bytes"),
    "flush": ("step", "released_bytes", "seconds", "stuck_bytes"),
}
_Record = dict[str, Any]


def thin(path: Path) -> int:
    """Rewrite a timeline file with fewer lines, and return its size in bytes.

    Of two readings of one moment the higher one stays, and both if one is higher in peak and the
    other in reserved, used or pressure. Releases are summed in pairs. The newest quarter stays. A
    kill at any moment leaves one intact file.
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
    unpaired: dict[object, tuple[int, _Record]] = {}
    for number, line in enumerate(lines):
        record = _parse(line)
        if record.get("kind") == "beginning" or record.get("moment") == "begin":
            unpaired.clear()  # never compare readings of two runs
        elif record.get("kind") in _NUMBERS and record.get("moment") != "end":
            names = ("kind", "run", "moment", "device", "total_bytes", "reason")
            key = str([record.get(name) for name in names])
            at, before = unpaired.pop(key, (number, record))
            is_pair = at < number and before["step"] <= record["step"]
            joined = _join(before, record) if is_pair else None
            if joined is not None:
                stay[at] = stay[number] = None
                place = number if joined["step"] == record["step"] else at
                stay[place] = json.dumps(joined).encode() + b"\n"
            elif not is_pair:
                unpaired[key] = number, record
    return (line for line in stay if line is not None)


def _parse(line: bytes) -> _Record:
    """Read a line; empty if it is damaged or of a later version."""
    try:
        record: _Record = json.loads(line)
        numbers = [record[name] for name in _NUMBERS.get(record["kind"], ())]
        numbers += [record.get(name, 1) for name in ("num_readings", "num_releases")]
        return record if {*map(type, numbers)} <= {int, float} else {}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}


def _join(one: _Record, other: _Record) -> _Record | None:
    """Return the sum of two releases, or the higher reading; None if both are highest."""
    if one["kind"] == "flush":
        sums = {name: one[name] + other[name] for name in ("released_bytes", "seconds")}
        stuck_bytes = max(one["stuck_bytes"], other["stuck_bytes"])
        return {**other, **sums, "stuck_bytes": stuck_bytes, **_count(one, other, "num_releases")}
    for high, low in ((other, one), (one, other)):
        if all(map(ge, _figures(high), _figures(low))):
            return {**high, **_count(one, other, "num_readings")}
    return None


def _count(one: _Record, other: _Record, name: str) -> dict[str, int]:
    return {name: one.get(name, 1) + other.get(name, 1)}


def _figures(reading: _Record) -> tuple[int, ...]:
    """Return peak, reserved, used, and `MemoryReading.pressure` in bytes: a pair has one total."""
    total, free = reading["total_bytes"], reading["free_bytes"]
    reserved, peak = reading["reserved_bytes"], reading["peak_allocated_bytes"]
    return peak, reserved, total - free, peak + max(0, total - free - reserved)
