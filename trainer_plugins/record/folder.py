"""Our folder in a run's output_dir, and dataclasses read from its JSON with every value checked."""

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from io import BufferedReader, FileIO
from itertools import count
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO, Literal, TypeVar, get_args, get_origin

T = TypeVar("T")

NAME = "_trainer_plugins"  # `Trainer.push_to_hub` skips names that begin with `_`
GONE = ".gone"  # suffix of an empty file for a rank whose process ended before others
DRY = "TRAINER_PLUGINS_DRYCUDA"  # in a dry run, the environment variable with its folder
_LONGEST_BYTES = 16 << 20

# A FIFO would block until another process opens its other end, and a terminal would become our
# controlling one. Windows has neither.
_DO_NOT_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)


def place_to_write(folder: Path) -> Path:
    """Return the folder itself, or in a dry run a separate one: a plan leaves the user's alone."""
    dry = os.environ.get(DRY)
    return Path(dry, "output", folder.name) if dry else folder


def folder_of_run(output_dir: Path) -> Path:
    """Return the folder for everything we write about the runs of an output_dir."""
    return place_to_write(output_dir) / NAME


def output_dir_of(folder: Path) -> Path:
    """Return the output_dir of our folder; any other folder, such as a copy, stands for both."""
    return folder.parent if folder.name == NAME else folder


def place_of_run(output_dir: Path) -> Path:
    """Return the folder to read: ours inside it, else the folder itself, such as a copy of ours."""
    ours = folder_of_run(output_dir)
    return ours if ours.is_dir() else output_dir


def write_new(output_dir: Path, stem: str, value: object) -> Path:
    """Write a value to the first unused of `<stem>.json`, `<stem>-2.json`, ..., or not at all."""
    text = json.dumps(value, indent=1, default=str)
    folder = folder_of_run(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = folder / (f"{stem}.json" if number == 1 else f"{stem}-{number}.json")
        with suppress(FileExistsError):
            path.touch(exist_ok=False)  # another process may be about to write here too
            break
    try:
        with replacing(path) as file:
            file.write(text.encode(errors="replace"))
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise
    return path


def read_all(output_dir: Path, stem: str, kind: type[T]) -> list[T]:
    """Read files of `write_new` by their stem (a regular expression), skipping damaged ones."""
    paths = sorted(place_of_run(output_dir).glob("*.json"))
    ours = [path for path in paths if re.fullmatch(rf"(?:{stem})(?:-[0-9]+)?\.json", path.name)]
    return [value for path in ours if (value := read_one(path, kind)) is not None]


def read_one(path: Path, kind: type[T]) -> T | None:
    """Read a value written by `write_new`; None if the file is damaged or something else."""
    try:
        return from_json(kind, read_json(path))
    except (OSError, ValueError, TypeError):
        return None


def read_json(path: Path) -> Any:
    """Read a JSON file of at most 16 MiB. Raises OSError, or ValueError if it is not JSON."""
    with BufferedReader(open_regular(path, "r")) as file:
        text = file.read(_LONGEST_BYTES + 1)
    if len(text) > _LONGEST_BYTES:
        raise ValueError(f"it has more than {_LONGEST_BYTES:,} bytes")
    try:
        return json.loads(text.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def open_regular(path: Path, mode: str) -> FileIO:
    """Open a regular file as `io.FileIO` does; a FIFO raises OSError instead of blocking."""
    file = FileIO(path, mode, opener=lambda name, flags: os.open(name, flags | _DO_NOT_WAIT, 0o666))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if _DO_NOT_WAIT:
        os.set_blocking(file.fileno(), True)
    return file


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a draft with a new file's mode; it replaces `path` unless the block raises."""
    draft = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    # "x" is O_CREAT | O_EXCL: anything that already exists, even a symlink, is an error.
    with open(draft, "xb") as file:
        try:
            yield file
            file.close()
            os.replace(draft, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft)
            raise


def from_json(kind: Callable[..., T], record: object) -> T:
    """Construct a dataclass from a record. Raises TypeError or ValueError for a wrong value."""
    if not isinstance(record, Mapping):
        raise TypeError(f"{kind} is made of a JSON object, got {type(record).__name__}")
    values = {}
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name in record:
            try:
                values[field.name] = _value(record[field.name], field.type)
            except TypeError as error:
                raise TypeError(f"{field.name}: {error}") from error
    return kind(**values)


def _value(value: object, kind: Any) -> object:
    """Convert a JSON value for its field: a list to a tuple, an object to a dataclass."""
    # Python 3.10 considers `tuple[int, ...]` a type.
    if get_origin(kind) is not None or not isinstance(kind, type):
        return _compose(value, kind)
    if is_dataclass(kind):
        return value if isinstance(value, kind) else from_json(kind, value)
    if issubclass(kind, Enum):
        return kind(value)
    if kind is int or kind is float:
        # A bool is an int in Python, but not in JSON.
        allowed = (int,) if kind is int else (int, float)
        is_valid = type(value) in allowed and abs(value) < 1 << 63  # type: ignore[arg-type]
    else:
        is_valid = isinstance(value, kind)
    if not is_valid:
        raise TypeError(f"{str(value)[:40]} is not a {kind.__name__}")
    return value


def _compose(value: object, kind: Any) -> object:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        if type(value) is type(parts[0]) and value in parts:
            return value
        raise TypeError(f"{str(value)[:40]!r} is none of {', '.join(map(str, parts))}")
    if origin is Mapping and isinstance(value, Mapping):
        return {_value(k, parts[0]): _value(v, parts[1]) for k, v in value.items()}
    if origin is tuple and isinstance(value, list | tuple):
        if parts[1:] == (...,):
            return tuple(_value(one, parts[0]) for one in value)
        if len(parts) == len(value):
            return tuple(_value(one, part) for one, part in zip(value, parts, strict=True))
    if origin is UnionType:
        if value is None and type(None) in parts:
            return None
        for part in parts:
            with suppress(TypeError):
                return _value(value, part)
    raise TypeError(f"{str(value)[:40]} is not a {kind}")
