"""Decide whose file a frame belongs to, and judge a request by its size alone."""

import re
from itertools import pairwise
from pathlib import Path

from trainer_plugins.units import GIB

_PACKAGE = Path(__file__).parents[1]
_ROOMS = {path.name for path in _PACKAGE.iterdir()}

# A user's folder may be called torch too.
OF_TORCH = re.compile(
    r"-packages/torch/|/torch/(?:nn|optim|autograd|utils|cuda|amp|_)|/torchinductor_"
    r"|/(?:lib/)?python3\.\d+/\w+\.py$|/Lib/\w+\.py$|^<frozen|^<string>"
)
_OF_LIBRARIES = re.compile(
    r"(?:site|dist)-packages|/lib/python3|/python3\.\d+/|/Lib/|/usr/lib/|/bin/"
    r"|^<(?!ipython|stdin)"
)

IMPOSSIBLE_BYTES = 1 << 40  # no card is this large; a larger request means a wrong shape


def is_ours(path: str) -> bool:
    """Return whether a path leads to a file of this package, not of a project with its name.

    >>> is_ours("/src/trainer_plugins/callbacks/oom_reporter.py"), is_ours("/trainer_plugins/me.py")
    (True, False)
    """
    parts = re.split(r"[/\\]", path) if _PACKAGE.name in path else []
    return any(name == _PACKAGE.name and room in _ROOMS for name, room in pairwise(parts))


def is_users(path: str) -> bool:
    """Return whether a file is outside installed packages and the standard library."""
    name = path.replace("\\", "/")
    return bool(name) and not _OF_LIBRARIES.search(name) and not OF_TORCH.search(name)


def is_refused_though_free(asked: int, free: int, slack: float) -> bool:
    """Return whether the driver refused a request for which the card had room."""
    return free > asked + slack + GIB // 4
