"""Climbs the stack, because callbacks get neither their Trainer nor its list of callbacks."""

import sys
from collections.abc import Iterator
from types import FrameType


def frames_above() -> Iterator[FrameType]:
    """Yield the frames that called the function which iterates over this, nearest first.

    Check a frame's code before its variables: reading `f_locals` keeps the variables alive.
    """
    frame = sys._getframe(1).f_back
    while frame is not None:
        yield frame
        frame = frame.f_back
