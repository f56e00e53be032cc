"""start() prepares a Python process that has the dry libraries. Imports torch."""

import ctypes
import os
import sys

from trainer_plugins.testing.drycuda.inside import alone, cheap, safety, shapes
from trainer_plugins.testing.drycuda.inside.values import Values


def start() -> None:
    """Prepare this process; it says what it is on stderr.

    Raises:
        RuntimeError: torch has found another card than the dry one.
    """
    if not is_dry():
        raise RuntimeError("TRAINER_PLUGINS_DRYCUDA is set, and torch has not loaded the dry card")
    say("a card that computes nothing: losses, metrics and texts of this process mean nothing")
    cheap.skip_initialisation()
    safety.protect()
    shapes.compute_on_the_host()
    values = Values(all_numbers=os.environ.get("TRAINER_PLUGINS_DRYCUDA_NUMBERS") == "1")
    values.__enter__()  # type: ignore[no-untyped-call] # for the rest of the process
    alone.let_the_store_be_alone()
    from trainer_plugins.testing.drycuda.inside import observe

    observe.record()


def is_dry() -> bool:
    """Return whether torch's CUDA runtime here is the dry one."""
    return hasattr(_runtime(), "drycuda_counters")


def counters() -> dict[str, int]:
    """Return what the libraries have counted in this process, by name."""
    library = _runtime()
    library.drycuda_counters.restype = ctypes.c_char_p
    lines = (line.partition(" ") for line in library.drycuda_counters().decode().splitlines())
    return {name: int(number) for number, _, name in lines}


def say(text: str) -> None:
    """Write a line to stderr, once for each process."""
    rank = os.environ.get("RANK")
    sys.stderr.write(f"dry CUDA{f' (rank {rank})' if rank else ''}: {text}\n")


def _runtime() -> ctypes.CDLL:
    return ctypes.CDLL(None)
