"""Asks the libraries of a process on the dry card, and writes its lines."""

import ctypes
import os
import sys
from pathlib import Path

from trainer_plugins.testing.card import SimCard

_LOADED = ctypes.CDLL(None)
"""All libraries of this process."""


def is_dry() -> bool:
    """Return whether torch's CUDA runtime here is the dry one."""
    return hasattr(_LOADED, "drycuda_counters")


def has_numbers() -> bool:
    """Return whether every operator of this process is computed, so that it really trains."""
    return os.environ.get("TRAINER_PLUGINS_DRYCUDA_NUMBERS") == "1"


def counters() -> dict[str, int]:
    """Return what the libraries have counted in this process, by name."""
    _LOADED.drycuda_counters.restype = ctypes.c_char_p
    lines = (line.partition(" ") for line in _LOADED.drycuda_counters().decode().splitlines())
    return {name: int(number) for number, _, name in lines}


def host_peak() -> int:
    """Return the most that tensors of 64 KiB and more took of main memory since the last call.

    Weights that lie in a mapped file of safetensors do not count: the kernel takes that memory back
    where it is short.
    """
    _LOADED.drycuda_host_peak.restype = ctypes.c_size_t
    return int(_LOADED.drycuda_host_peak())


def outside_bytes(index: int) -> int:
    """Return what is in use of a card besides the allocator's; 0 if this process has none of it."""
    import torch

    if torch.cuda.max_memory_reserved(index) == 0:
        return 0
    uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    files = Path(os.environ["TRAINER_PLUGINS_DRYCUDA"]).glob("card-*")
    (card,) = (each for each in map(SimCard, files) if each.uuid == uuid)
    return card.used_bytes - torch.cuda.memory_reserved(index)


def say(text: str) -> None:
    """Write a line to stderr, once for each process."""
    rank = os.environ.get("RANK")
    sys.stderr.write(f"dry CUDA{f' (rank {rank})' if rank else ''}: {text}\n")
