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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from struct import error as error_of_struct
from struct import iter_unpack
from typing import Any

from trainer_plugins.printable import printable
from trainer_plugins.units import MIB, size

LARGEST_BYTES = 256 * MIB  # of a file; ten times that in memory, and about half a minute
_MOST_CONTAINERS = 16_000_000  # a snapshot of 100 MB has 2 million lists and dicts
_MOST_NOTES = 16_000_000  # of memoised values and open containers: one or two for each container

_RECORD = (
    "make one with torch.cuda.memory._record_memory_history(context='alloc', max_entries=100_000) "
    "at the start and torch.cuda.memory._dump_snapshot(file) at the end"
)
_FILLED = "it would fill the memory with empty lists and the like; no snapshot does"

# The instructions of plain values, as `pickle` names them.
_PLAIN = (
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2",
    "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "EMPTY_LIST", "APPEND", "APPENDS",
    "EMPTY_DICT", "SETITEM", "SETITEMS", "TUPLE2", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET",
    "LONG_BINGET",
)  # fmt: skip
_GETS = re.compile(rb"(?:j[\s\S]{4}){1,5000}")  # LONG_BINGET many times in a row: a stack's frames


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
        return _OnlyPlainValues(data).load()
    except NotReadableError:
        raise
    except (EOFError, error_of_struct):
        raise NotReadableError(
            f"its end is missing: it stops after {len(data):,} bytes, as if it were still being "
            "written, or the disk was full; copy it again, or write a new one"
        ) from None
    except (pickle.PickleError, ValueError, TypeError, LookupError, AttributeError) as error:
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


class _Instructions(dict[int, Any]):
    def __missing__(self, code: int) -> Any:
        names = {ord(each.code): each.name for each in pickletools.opcodes}
        raise NotReadableError(
            f"it holds more than plain values (instruction {names.get(code, f'0x{code:02x}')}), so "
            f"it is not a snapshot, and reading it could run foreign code; {_RECORD}"
        )


class _OnlyPlainValues(pickle._Unpickler):
    """Python's own reader, which knows no instruction but those of plain values."""

    # Not the one in C: that would allocate its memo up to the largest number that a file names.

    read: Callable[[int], bytes]
    stack: list[Any]
    memo: dict[int, Any]
    pop_mark: Callable[[], list[Any]]
    dispatch = _Instructions(
        (code, pickle._Unpickler.dispatch[code])
        for code in (getattr(pickle, name)[0] for name in _PLAIN)
    )

    def __init__(self, data: bytes) -> None:
        self._data, self._file = data, BytesIO(data)
        super().__init__(self._file)

    def skip_frame(self) -> None:
        self.read(8)  # its length; all of the file is in memory already

    def load_gets(self) -> None:
        gets = _GETS.match(self._data, self._file.tell() - 1)
        if gets is None:
            raise EOFError
        self.stack += [self.memo[place] for (place,) in iter_unpack("<xI", gets[0])]
        self._file.seek(gets.end())

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._fill([key, value])

    def load_setitems(self) -> None:
        self._fill(self.pop_mark())

    def _fill(self, items: list[Any]) -> None:
        if not set(map(type, items[::2])) <= {str}:
            raise NotReadableError(
                f"a key of one of its dicts is no text, so it is not a snapshot; {_RECORD}"
            )
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    dispatch[pickle.FRAME[0]] = skip_frame
    dispatch[pickle.LONG_BINGET[0]] = load_gets
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems


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
