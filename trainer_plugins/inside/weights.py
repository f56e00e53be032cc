"""Placeholder weights: a sparse checkpoint, which transformers loads with its own code.

If a model's folder has a config but no weights, we create safetensors files whose data are a hole
in the file. They have the names, shapes and dtype of a checkpoint for that config. They take no
space, and loading them takes only the time for their headers.
"""

import functools
import json
import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

_PART_BYTES = 2 << 30  # of one file: Linux maps none that is larger than main memory

_wanted: ContextVar[tuple[type, str, dict[str, Any]] | None] = ContextVar("wanted", default=None)


def make_those_that_are_missing() -> None:
    """Make `from_pretrained` continue with holes if a folder has no weights."""
    from transformers import modeling_utils

    load = modeling_utils.PreTrainedModel.from_pretrained.__func__
    resolve = modeling_utils._get_resolved_checkpoint_files  # AttributeError where it is gone

    @functools.wraps(load)
    def from_pretrained(cls: type, name: Any, *args: Any, **kwargs: Any) -> Any:
        token = _wanted.set((cls, str(name), kwargs))
        try:
            return load(cls, name, *args, **kwargs)
        finally:
            _wanted.reset(token)

    @functools.wraps(resolve)
    def resolve_or_make(*args: Any, **kwargs: Any) -> Any:
        try:
            return resolve(*args, **kwargs)
        except OSError:
            wanted = _wanted.get()
            if wanted is None:
                raise
            return holes_for(*wanted)

    # A checkpoint in one file could not be loaded again: see `_PART_BYTES`.
    save = modeling_utils.PreTrainedModel.save_pretrained
    modeling_utils.PreTrainedModel.save_pretrained = functools.partialmethod(
        save, max_shard_size=_PART_BYTES
    )
    modeling_utils.PreTrainedModel.from_pretrained = classmethod(from_pretrained)
    modeling_utils._get_resolved_checkpoint_files = resolve_or_make


def holes_for(cls: Any, name: str, options: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Write a sparse checkpoint for a model class and the location of its config.

    Returns:
        The files, and the file of each tensor, in the format of a checkpoint's index.
    """
    from huggingface_hub import split_state_dict_into_shards_factory
    from transformers import AutoConfig

    config = options.get("config")
    if not hasattr(config, "to_dict"):
        config = AutoConfig.from_pretrained(config or name, trust_remote_code=True)
    dtype = _dtype_of(options) or getattr(config, "dtype", None) or torch.bfloat16
    with torch.device("meta"):
        model = cls(config)
        model.tie_weights()  # transformers 5.0 creates both of two tied weights
    once: dict[int, tuple[str, torch.Tensor]] = {}  # a checkpoint stores tied weights once
    for key, tensor in model.state_dict(keep_vars=True).items():
        once.setdefault(id(tensor), (key, tensor))
    tensors = {
        key: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for key, tensor in once.values()
    }
    with suppress(ImportError):  # transformers 4 stacks no experts while loading
        from transformers.core_model_loading import revert_weight_conversion

        tensors = revert_weight_conversion(model, tensors)
    folder = Path(os.environ["TRAINER_PLUGINS_DRYCUDA"]) / "weights"
    folder.mkdir(exist_ok=True)
    stem = f"{os.getpid()}-{len(list(folder.iterdir()))}"
    parts = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.nbytes,  # of a view: its own
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=_PART_BYTES,
    )
    for file, names in parts.filename_to_tensors.items():
        write_holes({name: tensors[name] for name in names}, folder / file, {"format": "pt"})
    index = {"weight_map": parts.tensor_to_filename, "all_checkpoint_keys": [*tensors]}
    return [str(folder / file) for file in parts.filename_to_tensors], index  # 4.57 reads the keys


def _dtype_of(options: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype to which a model is converted on the CPU, where that would take memory.

    On a card the weights arrive in the dtype of their files, and are converted there.
    """
    if options.get("device_map") is not None or options.get("quantization_config") is not None:
        return None
    asked = options.get("dtype", options.get("torch_dtype"))
    found = getattr(torch, asked, None) if isinstance(asked, str) else asked
    return found if isinstance(found, torch.dtype) else None


def write_holes(
    tensors: Mapping[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Act as safetensors' `save_file`, but write the data as a hole in the file.

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
