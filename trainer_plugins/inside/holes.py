"""Writes safetensors files whose data are a hole of the file system: they take no space."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import torch

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""How safetensors calls a dtype: https://github.com/huggingface/safetensors#format."""


def write_holes(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
) -> None:
    """Write a file with the names, shapes and dtypes of tensors; all their bytes read as zero."""
    shown: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.element_size()
        shown[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    header = json.dumps(shown).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + at)
