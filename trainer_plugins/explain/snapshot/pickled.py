"""Reads a pickle that may come from anybody: plain values only, within bounds, or not at all.

A pickle is a program. Each of its instructions is looked at before the first one runs, and only
those pass that make None, booleans, numbers, texts, lists, dicts and pairs of small numbers. That
is what a memory snapshot is made of (all 75 of `docs/explain_snapshots.md`), and none of it runs
code. A list of what is allowed is short enough to be checked; a list of attacks is not.
"""

import gc
import io
import os
import pickle
import pickletools
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from trainer_plugins.printable import printable
from trainer_plugins.units import MIB, size

LARGEST_BYTES = 256 * MIB
"""The largest file that is read; it takes ten times as much memory, and about 20 seconds."""

_MOST_CONTAINERS = 16_000_000  # a snapshot of 100 MB has 2 million lists and dicts

_RECORD = (
    "make one with torch.cuda.memory._record_memory_history(max_entries=100_000) at the start "
    "and torch.cuda.memory._dump_snapshot(file) at the end"
)


class NotReadableError(ValueError):
    """Says in one line why a file cannot be read as a snapshot, and what to do."""


# Instructions without an own length, or with one of a byte: a run of them is checked at once. A
# number has at most 9 bytes and a pair holds two numbers, because a dict of longer numbers, or of
# nested tuples, can be made as slow as one likes.
_NUMBER = rb"K[\s\S]|M[\s\S]{2}|J[\s\S]{4}|\x8a(?:%s)" % b"|".join(
    rb"\x%02x[\s\S]{%d}" % (length, length) for length in (6, 5, 8, 7, 9, 4, 3, 2, 1, 0)
)
_PLAIN = re.compile(
    # LONG_BINGET, BINGET, MEMOIZE, marks, ends of lists and dicts, None and booleans, numbers
    rb"(?:j[\s\S]{4}|h[\s\S]|[]}\x94(uNaes\x88\x89]|(?:%s)(?:(?:%s)\x86)?|G[\s\S]{8}){1,5000}"
    % (_NUMBER, _NUMBER)
)
_FRAME, _STOP = 0x95, 0x2E
_SHORT_TEXT, _TEXT, _PUT, _LONG_PUT = 0x8C, 0x58, 0x71, 0x72

_DAMAGED = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    OverflowError,
    MemoryError,
)


class _NoClasses(pickle.Unpickler):
    """Builds values only. `_check` has let nothing else through; this holds if it is wrong."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise NotReadableError(_classes("GLOBAL"))

    def persistent_load(self, pid: object) -> NoReturn:
        raise NotReadableError(_classes("PERSID"))


def load(path: Path) -> Any:
    """Read a pickle of plain values.

    Raises:
        NotReadableError: it is not one, it is damaged or too large, or it would run code.
    """
    data = _bytes_of(path)
    _check(data)
    try:
        return _NoClasses(io.BufferedReader(io.BytesIO(data))).load()
    except NotReadableError:
        raise
    except _DAMAGED as error:
        raise NotReadableError(
            f"it is damaged ({type(error).__name__}: {printable(error)}); copy it again, or "
            "write a new one"
        ) from None


def _bytes_of(path: Path) -> bytes:
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe never blocks
        with os.fdopen(handle, "rb") as file:
            about = os.fstat(handle)
            if not stat.S_ISREG(about.st_mode):
                raise NotReadableError(f"it is not a file; {_RECORD}")
            data = file.read(LARGEST_BYTES + 1) if about.st_size <= LARGEST_BYTES else None
    except OSError as error:
        raise NotReadableError(f"it cannot be opened: {printable(error.strerror)}") from None
    if data is None or len(data) > LARGEST_BYTES:
        raise NotReadableError(
            f"it has {size(about.st_size)}, and at most {size(LARGEST_BYTES)} are read; "
            "record fewer events: _record_memory_history(max_entries=100_000)"
        )
    return data


def _check(data: bytes) -> None:
    """Look at every instruction of a pickle.

    Raises:
        NotReadableError: one is not needed for plain values, or the end is missing.
    """
    if data[:1] != b"\x80" or data[1:2] not in (b"\x02", b"\x03", b"\x04", b"\x05"):
        what = "it is empty" if not data else "it is not a pickle of protocol 2 to 5"
        raise NotReadableError(f"{what}; {_RECORD}")
    if data.count(b"]") + data.count(b"}") > _MOST_CONTAINERS:
        raise NotReadableError("it would fill the memory with empty lists; no snapshot does")
    position = 2
    while position < len(data):
        plain = _PLAIN.match(data, position)
        if plain is not None:
            position = plain.end()
            continue
        code = data[position]
        if code == _STOP:
            return
        position = _behind(data, position, code)
    raise NotReadableError(
        f"its end is missing: it stops after {len(data):,} bytes, as if it were still being "
        "written, or the disk was full; copy it again, or write a new one"
    )


def _behind(data: bytes, position: int, code: int) -> int:
    """Return where the next instruction begins, behind one that names a length or a place."""
    if code == _SHORT_TEXT:
        return position + 2 + int.from_bytes(data[position + 1 : position + 2], "little")
    number = int.from_bytes(data[position + 1 : position + 5], "little")
    if code == _TEXT:
        return position + 5 + number
    if code == _PUT:
        return position + 2
    if code == _LONG_PUT and number <= position:  # a memo has room up to its highest place
        return position + 5
    if code == _FRAME:
        if int.from_bytes(data[position + 1 : position + 9], "little") > len(data):
            return len(data)
        return position + 9
    if code in b"jhKMJG\x8a" and len(data) - position < 11:  # a number that is cut off
        return len(data)
    raise NotReadableError(_classes(_name_of(code)))


def _name_of(code: int) -> str:
    names = {ord(each.code): each.name for each in pickletools.opcodes}
    return names.get(code, f"0x{code:02x}")


def _classes(instruction: str) -> str:
    return (
        f"it holds more than plain values (instruction {instruction}), so it is not a snapshot, "
        f"and reading it could run foreign code; {_RECORD}"
    )


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector from looking at all objects again for each few new ones."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
