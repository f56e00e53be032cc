"""Files in folders of other people: opened without waiting for anybody, and replaced as a whole or not at all."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

# A FIFO would make us wait for its other end, and a terminal would become ours. Windows has
# neither.
_DO_NOT_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)


def open_regular(path: Path, mode: str) -> FileIO:
    """Open a file if it is one, as `io.FileIO` does.

    Raises:
        OSError: it cannot be opened, or it is a FIFO, a device, a socket or a folder.
    """
    file = FileIO(path, mode, opener=lambda name, flags: os.open(name, flags | _DO_NOT_WAIT, 0o666))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    if _DO_NOT_WAIT:
        os.set_blocking(file.fileno(), True)
    return file


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file beside `path` that takes its place when all of it is written.

    Its mode is that of any new file.

    Where anything is raised, `path` stays as it was, and the draft is removed. Who has the old file
    open keeps it.

    Raises:
        OSError: the folder cannot be written, is full, or `path` is a folder.
    """
    draft = path.with_name(f".{path.name}.{token_hex(8)}")
    # "x" is O_CREAT | O_EXCL: what is there already is an error, a symlink too. So nothing of
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
