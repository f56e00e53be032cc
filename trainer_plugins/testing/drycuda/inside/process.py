"""Asks the libraries of a process on the dry card, and writes its lines."""

import ctypes
import os
import sys


def is_dry() -> bool:
    """Return whether torch's CUDA runtime here is the dry one."""
    return hasattr(_runtime(), "drycuda_counters")


def has_numbers() -> bool:
    """Return whether every operator of this process is computed, so that it really trains."""
    return os.environ.get("TRAINER_PLUGINS_DRYCUDA_NUMBERS") == "1"


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
