"""is_ours: whether a file of a traceback belongs to this package, wherever it is installed."""

import re
from itertools import pairwise
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_ROOMS = {path.name for path in _PACKAGE.iterdir()}


def is_ours(path: str) -> bool:
    """Say whether a path leads to a file of this package, and not of a project that has its name.

    >>> is_ours("/src/trainer_plugins/callbacks/oom_reporter.py"), is_ours("/trainer_plugins/me.py")
    (True, False)
    """
    parts = re.split(r"[/\\]", path) if _PACKAGE.name in path else []
    return any(name == _PACKAGE.name and room in _ROOMS for name, room in pairwise(parts))
