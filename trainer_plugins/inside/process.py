"""Queries the libraries of a process on the dry card, and prints its messages."""

import ctypes
import os
import sys
from pathlib import Path

from trainer_plugins.testing.card import SimCard

_LOADED = ctypes.CDLL(None)
"""All libraries of this process."""


def is_dry() -> bool:
    """Return whether torch uses the dry CUDA runtime here."""
    return hasattr(_LOADED, "drycuda_counters")


def has_numbers() -> bool:
    """Return whether this process computes every operator, so that it really trains."""
    return os.environ.get("TRAINER_PLUGINS_DRYCUDA_NUMBERS") == "1"


def counters() -> dict[str, int]:
    """Return this process's counters of the dry libraries, by name."""
    _LOADED.drycuda_counters.restype = ctypes.c_char_p
    lines = (line.partition(" ") for line in _LOADED.drycuda_counters().decode().splitlines())
    return {name: int(number) for number, _, name in lines}


def host_peak() -> int:
    """Return the peak main memory of tensors of 64 KiB and more since the last call.

    Weights in a mapped safetensors file do not count: the kernel can reclaim that memory.
    """
    _LOADED.drycuda_host_peak.restype = ctypes.c_size_t
    return int(_LOADED.drycuda_host_peak())


def outside_bytes(index: int) -> int:
    """Return the memory used on a card outside the allocator; 0 if this process does not use it."""
    import torch

    if torch.cuda.max_memory_reserved(index) == 0:
        return 0
    uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    files = Path(os.environ["TRAINER_PLUGINS_DRYCUDA"]).glob("card-*")
    (card,) = (each for each in map(SimCard, files) if each.uuid == uuid)
    return card.used_bytes - torch.cuda.memory_reserved(index)


def say(text: str) -> None:
    """Print a line to stderr, prefixed with this process's rank, if it has one."""
    rank = os.environ.get("RANK")
    sys.stderr.write(f"dry CUDA{f' (rank {rank})' if rank else ''}: {text}\n")
