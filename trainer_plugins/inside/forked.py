"""Trains a request in a process forked for it: WALL REQUEST.

The server has imported torch over the dry libraries, and touched no card.
"""

import ctypes
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import torch  # noqa: F401 - before `start`, which runs when torch has been imported

from trainer_plugins.inside import of_request, start
from trainer_plugins.namespaces import build_wall

if __name__ != "__main__":  # in the server: build a table of transformers once for all forks
    with suppress(ImportError):  # transformers 4 has none
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("")


def main(wall: str, request: str) -> None:
    """Attach to this run's cards, go behind the wall, and train."""
    libraries = ctypes.CDLL(None)
    libraries.scriptedNvmlFollow(os.environ["TRAINER_PLUGINS_NVML_SCRIPT"].encode())
    if asked := json.loads(wall):
        real = map(Path, asked["real"])
        build_wall(Path(asked["scratch"]), real, has_network=asked["network"])
    else:
        libraries.drywall_read()
    start.begin()
    of_request.main(request)


if __name__ == "__main__":
    main(*sys.argv[1:])
