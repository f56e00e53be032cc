"""Writes safetensors files whose data are a hole of the file system: they take no space."""

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import torch


def write_holes(
    tensors: Mapping[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Do what safetensors' `save_file` does, with the names, shapes and dtypes of tensors alone.

    All their bytes read as zero.
    """
    from safetensors.torch import _TYPES

    names = {dtype: name for name, dtype in _TYPES.items()}
    shown: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.element_size()
        shown[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    header = json.dumps(shown).encode()
    header += b" " * (-len(header) % 8)
    with Path(filename).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + at)
