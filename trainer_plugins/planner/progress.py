"""Where a prediction is: its subprocess writes down the step it is in; whoever waits reads that, and shows it."""

import contextlib
import sys
from pathlib import Path

_STARTING = "starting Python and importing torch and transformers"
_OVER = "\r\x1b[K"  # to the beginning of the line, and erase it
_file: Path | None = None


def write_to(file: Path) -> None:
    """Write the steps of this process to a file, the last one over the one before.

    For the subprocess.
    """
    global _file
    _file = file


def step(name: str) -> None:
    """Say what is being done now, as in "building the model"; nothing where nobody waits."""
    if _file is not None:
        _file.write_text(name)


class Progress:
    """Reads the step, and shows it on standard error where that is a terminal.

    Args:
        file: what the subprocess writes to.
    """

    def __init__(self, file: Path) -> None:
        self._path = file
        self._is_shown = False

    @property
    def step(self) -> str:
        """What the subprocess is doing, or was doing when it ended."""
        with contextlib.suppress(OSError):
            return self._path.read_text() or _STARTING
        return _STARTING

    def show(self, seconds: float) -> None:
        """One line, over the one before."""
        if sys.stderr.isatty():
            sys.stderr.write(f"{_OVER}planning: {self.step} ({seconds:.0f} s)")
            sys.stderr.flush()
            self._is_shown = True

    def clear(self) -> None:
        """Leave nothing of it on the terminal."""
        if self._is_shown:
            sys.stderr.write(_OVER)
            sys.stderr.flush()
