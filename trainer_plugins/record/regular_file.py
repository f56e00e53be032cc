"""Files in other people's folders: opened without blocking, replaced as a whole or not at all."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

# A FIFO would block until somebody opens its other end, and a terminal would become our controlling
# one. Windows has neither.
_DO_NOT_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)


def open_regular(path: Path, mode: str) -> FileIO:
    """Open a regular file, as `io.FileIO` does.

    Raises:
        OSError: it cannot be opened, or it is a FIFO, a device, a socket or a folder.
    """
    file = FileIO(path, mode, opener=lambda name, flags: os.open(name, flags | _DO_NOT_WAIT, 0o666))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if _DO_NOT_WAIT:
        os.set_blocking(file.fileno(), True)
    return file


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a draft beside `path`, which replaces it when the block ends.

    The file gets the mode of any new file. If the block raises, `path` stays as it was and the
    draft is removed. A process that has the old file open keeps it.

    Raises:
        OSError: the folder cannot be written, is full, or `path` is a folder.
    """
    draft = path.with_name(f".{path.name}.{token_hex(8)}")
    # "x" is O_CREAT | O_EXCL: whatever is there already, even a symlink, is an error. So no file of
    # anybody's is overwritten.
    with open(draft, "xb") as file:
        try:
            yield file
            file.close()
            os.replace(draft, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft)
            raise
