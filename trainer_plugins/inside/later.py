"""Finds out whether a program will train again."""

import dis
from pathlib import Path
from types import FrameType


def later_training(frame: FrameType | None) -> str | None:
    """Return where the functions that are under way will call another `train`; None if nowhere.

    A model's `train` is one too: the program then goes on for a while.
    """
    while frame is not None:
        for each in dis.get_instructions(frame.f_code):
            is_later = each.offset > frame.f_lasti and each.argval == "train"
            if is_later and each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                line = each.positions.lineno if each.positions else ""
                return f"{Path(frame.f_code.co_filename).name}:{line}"
        frame = frame.f_back
    return None
