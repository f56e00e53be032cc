"""Read a pickle of any origin: plain values only, within bounds, or not at all.

A pickle is a program. This module interprets it, and supports only instructions that build None,
booleans, numbers, texts, lists, dicts with texts for keys, and pairs of numbers. A memory snapshot
has no others (all 75 of `tests/explain/README.md`), and none of them runs code. Keys must be
texts, because an attacker can choose numbers so that a dict of them takes hours, but cannot predict
how Python hashes a text.
"""

import gc
import pickle
import pickletools
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from struct import iter_unpack, unpack
from typing import Any

from trainer_plugins.printable import printable
from trainer_plugins.units import MIB, size

LARGEST_BYTES = 256 * MIB  # of a file; ten times that in memory, and about half a minute
_MOST_CONTAINERS = 16_000_000  # a snapshot of 100 MB has 2 million lists and dicts
_MOST_NOTES = 32_000_000  # of memoised values and open containers: one or two for each container
_MOST_WAITING = 16_000_000  # of values in no list or dict yet; a snapshot has a few thousand

_RECORD = (
    "make one with torch.cuda.memory._record_memory_history(context='alloc', max_entries=100_000) "
    "at the start and torch.cuda.memory._dump_snapshot(file) at the end"
)
_FILLED = "it would fill the memory with empty lists and the like; no snapshot does"

# Instructions by their codes, as in `pickletools`, each with the number of bytes that follow.
_LENGTHS = {ord(code): length for code, length in {
    "h": 1, "K": 1, "M": 2, "J": 4, "\x8a": 1, "G": 8, "\x8c": 1, "X": 4, "q": 1, "r": 4,
    "\x95": 8,
}.items()}  # fmt: skip
_COUNTED = b"\x8a\x8cX"  # followed by the length of a number or a text, then by its bytes
_NUMBERS = {ord("K"): False, ord("M"): False, ord("J"): True, 0x8A: True}  # whether signed
_GET, _LONG_GET, _PUTS, _TEXTS = ord("h"), ord("j"), b"qr", b"\x8cX"
_FLOAT, _FRAME, _MEMOIZE, _MARK, _STOP = ord("G"), 0x95, 0x94, ord("("), ord(".")
_LONG_GETS = re.compile(rb"(?:j[\s\S]{4}){1,5000}")  # many in a row: the frames of a stack
_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False}


class NotReadableError(ValueError):
    """Says in one line why a file cannot be read as a snapshot, and how to record one."""


def load(path: Path) -> Any:
    """Read a pickle of plain values, or raise NotReadableError."""
    data = _bytes_of(path)
    if data[:1] != b"\x80" or data[1:2] not in (b"\x02", b"\x03", b"\x04", b"\x05"):
        what = "it is empty" if not data else "it is not a pickle of protocol 2 to 5"
        raise NotReadableError(f"{what}; {_RECORD}")
    num_notes = data.count(b"\x94") + data.count(b"(")
    if data.count(b"]") + data.count(b"}") > _MOST_CONTAINERS or num_notes > _MOST_NOTES:
        raise NotReadableError(_FILLED)
    try:
        return _Program().run(data)
    except NotReadableError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise NotReadableError(
            f"it is damaged ({type(error).__name__}: {printable(error)}); copy it again, or "
            "write a new one"
        ) from None


def load_own(path: Path) -> Any:
    """Read a file that this package has written, twenty times as fast; it looks up no classes."""
    with path.open("rb") as file:
        return _OfPlainValues(file).load()


class _OfPlainValues(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise NotReadableError(f"it holds more than plain values: {module}.{name}")


def _bytes_of(path: Path) -> bytes:
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):  # a pipe would block
            raise NotReadableError(f"it is not a file; {_RECORD}")
        if about.st_size <= LARGEST_BYTES:
            return path.read_bytes()
    except OSError as error:
        raise NotReadableError(f"it cannot be opened: {printable(error.strerror)}") from None
    raise NotReadableError(
        f"it has {size(about.st_size)}, and at most {size(LARGEST_BYTES)} are read; "
        "record fewer events: _record_memory_history(context='alloc', max_entries=100_000)"
    )


class _Program:
    def __init__(self) -> None:
        self._made: list[Any] = []  # values in no list or dict yet, the newest last
        self._marks: list[int] = []  # the start of each list or dict that is not filled yet
        self._memo: list[Any] = []

    def run(self, data: bytes) -> Any:
        """Return the value it builds; invalid instructions raise arbitrary errors."""
        made, memo, at, end = self._made, self._memo, 2, len(data)
        while at < end and len(made) <= _MOST_WAITING:
            code = data[at]
            if code == _LONG_GET:
                gets = _LONG_GETS.match(data, at)
                if gets is None:
                    break
                made += [memo[place] for (place,) in iter_unpack("<xI", gets[0])]
                at = gets.end()
                continue
            at += 1
            if code == _MEMOIZE:
                memo.append(made[-1])
            elif code in _LENGTHS:
                start, at = at, at + _LENGTHS[code]
                if code in _COUNTED:
                    start, at = at, at + int.from_bytes(data[start:at], "little")
                if at > end:
                    break
                if code == _GET:
                    made.append(memo[data[start]])
                elif code in _NUMBERS:
                    made.append(int.from_bytes(data[start:at], "little", signed=_NUMBERS[code]))
                else:
                    self._take(code, data[start:at])
            elif code == _STOP:
                return made[-1]
            else:
                self._compose(code)
        if len(made) > _MOST_WAITING:
            raise NotReadableError(_FILLED)
        raise NotReadableError(
            f"its end is missing: it stops after {end:,} bytes, as if it were still being written, "
            "or the disk was full; copy it again, or write a new one"
        )

    def _take(self, code: int, operand: bytes) -> None:
        if code in _TEXTS:
            self._made.append(operand.decode())
        elif code == _FLOAT:
            self._made.append(unpack(">d", operand)[0])
        elif code in _PUTS and int.from_bytes(operand, "little") == len(self._memo):
            self._memo.append(self._made[-1])
        elif code != _FRAME:  # also a memo index that skips ahead
            raise NotReadableError(_refuse_value(code))

    def _compose(self, code: int) -> None:
        made = self._made
        if code == _MARK:
            self._marks.append(len(made))
        elif code in b"]}":
            made.append([] if code in b"]" else {})
        elif code in b"uesa":  # SETITEMS, APPENDS; SETITEM, APPEND without a mark
            start = self._marks.pop() if code in b"ue" else len(made) - (2 if code in b"s" else 1)
            items = made[start:]
            del made[start:]
            _fill(made[-1], items, is_dict=code in b"us")
        elif code in _CONSTANTS:
            made.append(_CONSTANTS[code])
        elif code == 0x86 and set(map(type, made[-2:])) == {int}:  # TUPLE2
            made[-2:] = [tuple(made[-2:])]
        else:
            raise NotReadableError(_refuse_value(code))


def _fill(container: Any, items: list[Any], *, is_dict: bool) -> None:
    if not is_dict:
        container.extend(items)
    elif set(map(type, items[::2])) <= {str}:
        container.update(zip(items[::2], items[1::2], strict=True))
    else:
        raise NotReadableError(
            f"a key of one of its dicts is no text, so it is not a snapshot; {_RECORD}"
        )


def _refuse_value(code: int) -> str:
    names = {ord(each.code): each.name for each in pickletools.opcodes}
    return (
        f"it holds more than plain values (instruction {names.get(code, f'0x{code:02x}')}), so it "
        f"is not a snapshot, and reading it could run foreign code; {_RECORD}"
    )


@contextmanager
def pause_collection() -> Iterator[None]:
    """Pause the garbage collector, which would visit all objects again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
