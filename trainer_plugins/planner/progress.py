"""Show what a prediction is doing: its subprocess writes steps, the waiting process reads them."""

import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_STARTING = "starting Python and importing torch and transformers"
_OVER = "\r\x1b[K"  # to the beginning of the line, and erase it
_LINES = "lines"  # next to the file of the step: each line of `tell`
_file: Path | None = None
_part = _step = ""


def write_to(file: Path) -> None:
    """Write each later step of this process to a file, over the step before: in the subprocess."""
    global _file
    _file = file


def part(name: str) -> None:
    """Note the part of the work to which the later steps belong, as in "way 2 of 4"."""
    global _part
    _part = name
    step("beginning")


def step(name: str) -> None:
    """Write the current step, as in "building the model"; do nothing if no process waits."""
    global _step
    _step = f"{_part}: {name}" if _part else name
    if _file is not None:
        _file.write_text(_step)


def inside(place: str) -> None:
    """Write where in the current step the work is, as in "the forward of lm_head"."""
    if _file is not None:
        _file.write_text(f"{_step}, in {place}")


def tell(line: Mapping[str, object]) -> None:
    """Write what is known before the end, for the process that waits, if one does."""
    if _file is not None:
        with _file.with_name(_LINES).open("a") as file:
            file.write(json.dumps(line) + "\n")


class Progress:
    """Reads the current step, and shows it on a terminal; `found` gets each line of `tell`."""

    def __init__(self, file: Path, found: Callable[[Any], None]) -> None:
        self._path, self._lines, self._found = file, file.with_name(_LINES), found
        self._num_read = 0
        self._is_shown = False

    @property
    def step(self) -> str:
        """Return the current step of the subprocess, or its last one if it has ended."""
        with contextlib.suppress(OSError):
            return self._path.read_text() or _STARTING
        return _STARTING

    def show(self, seconds: float) -> None:
        """Hand on new results, and replace the line on the terminal by the step and the seconds."""
        self._hand_on()
        if sys.stderr.isatty():
            sys.stderr.write(f"{_OVER}planning: {self.step} ({seconds:.0f} s)")
            sys.stderr.flush()
            self._is_shown = True

    def clear(self) -> None:
        """Erase the line from the terminal, and hand on the last results."""
        self._hand_on()
        self.erase()

    def erase(self) -> None:
        """Erase the line from the terminal."""
        if self._is_shown:
            sys.stderr.write(_OVER)
            sys.stderr.flush()

    def _hand_on(self) -> None:
        with contextlib.suppress(OSError):
            whole = self._lines.read_text().split("\n")[:-1]  # the last may not be written yet
            for line in whole[self._num_read :]:
                self.erase()
                self._found(json.loads(line))
            self._num_read = len(whole)
