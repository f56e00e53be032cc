"""Show what a prediction is doing: its subprocess writes the step, the waiting process reads it."""

import contextlib
import sys
from pathlib import Path

_STARTING = "starting Python and importing torch and transformers"
_OVER = "\r\x1b[K"  # to the beginning of the line, and erase it
_file: Path | None = None


def write_to(file: Path) -> None:
    """Write each later step of this process to a file, in place of the step before.

    Only the subprocess calls this.
    """
    global _file
    _file = file


def step(name: str) -> None:
    """Write down the current step, as in "building the model"; do nothing if no process waits."""
    if _file is not None:
        _file.write_text(name)


class Progress:
    """Reads the current step, and shows it on standard error if that is a terminal.

    Args:
        file: the file to which the subprocess writes.
    """

    def __init__(self, file: Path) -> None:
        self._path = file
        self._is_shown = False

    @property
    def step(self) -> str:
        """Return the current step of the subprocess, or its last one if it has ended."""
        with contextlib.suppress(OSError):
            return self._path.read_text() or _STARTING
        return _STARTING

    def show(self, seconds: float) -> None:
        """Replace the line on the terminal by the current step and the seconds so far."""
        if sys.stderr.isatty():
            sys.stderr.write(f"{_OVER}planning: {self.step} ({seconds:.0f} s)")
            sys.stderr.flush()
            self._is_shown = True

    def clear(self) -> None:
        """Erase the line from the terminal."""
        if self._is_shown:
            sys.stderr.write(_OVER)
            sys.stderr.flush()
