"""Files of JSON in somebody's folder: `run.json`, then `run-2.json`; none is ever written over."""

import json
import os
import re
from contextlib import suppress
from io import BufferedReader
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from trainer_plugins.record.regular_file import open_regular, replacing
from trainer_plugins.record.typed import made

T = TypeVar("T")

_LONGEST_BYTES = 16 << 20


def write_new(folder: Path, stem: str, value: object) -> Path:
    """Write a value to `<stem>.json`, or to the first of `<stem>-2.json` and so on that is free.

    The file is there as a whole or not at all.

    Raises:
        OSError: the folder cannot be made or written, or is full.
    """
    text = json.dumps(value, indent=1, default=str)
    folder.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = folder / (f"{stem}.json" if number == 1 else f"{stem}-{number}.json")
        try:
            # Take the name first: another process may be about to write here too.
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except FileExistsError:
            continue
        try:
            rewrite(path, text)
        except BaseException:
            with suppress(OSError):
                path.unlink()
            raise
        return path
    raise AssertionError("counting has no end")


def rewrite(path: Path, text: str) -> None:
    """Replace a file of ours as a whole.

    Raises:
        OSError: the folder cannot be written, or is full.
    """
    with replacing(path) as file:
        file.write(text.encode(errors="replace"))
        file.flush()
        os.fsync(file.fileno())


def read_all(folder: Path, stem: str, kind: type[T]) -> list[T]:
    """Read the values that `write_new` wrote under a stem, which is a regular expression.

    Files that are damaged, or of a later form, are left out.
    """
    paths = sorted(folder.glob("*.json"))
    ours = [path for path in paths if re.fullmatch(rf"(?:{stem})(?:-[0-9]+)?\.json", path.name)]
    return [value for path in ours if (value := read_one(path, kind)) is not None]


def read_one(path: Path, kind: type[T]) -> T | None:
    """Read a value that `write_new` wrote; None if the file is damaged, or of something else."""
    try:
        return made(kind, read_json(path))
    except (OSError, ValueError, TypeError):
        return None


def read_json(path: Path) -> Any:
    """Read a file of JSON, of 16 MiB at most.

    Raises:
        OSError: it cannot be read, or is not a regular file.
        ValueError: it is no JSON, or too long.
    """
    with BufferedReader(open_regular(path, "r")) as file:
        text = file.read(_LONGEST_BYTES + 1)
    if len(text) > _LONGEST_BYTES:
        raise ValueError(f"it has more than {_LONGEST_BYTES:,} bytes")
    try:
        return json.loads(text.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
