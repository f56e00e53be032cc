"""Keeps a dry run from pushing, reporting, and writing the bytes of a checkpoint."""

import io
import json
import mmap
import os
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer_plugins.inside.alone import is_alone
from trainer_plugins.inside.process import has_numbers
from trainer_plugins.inside.weights import write_holes
from trainer_plugins.patched import Patches

_SMALL_BYTES = 1 << 20


def save_no_bytes() -> None:
    """Make torch write holes instead of large tensors, and map the files it reads."""
    import torch.serialization
    from torch.utils._pytree import tree_leaves

    def save_holes(
        save: Callable[..., None], obj: object, f: Any, *args: Any, **kwargs: Any
    ) -> None:
        tensors = (each for each in tree_leaves(obj) if isinstance(each, torch.Tensor))
        is_small = sum(each.nbytes for each in tensors) < _SMALL_BYTES  # such as generators
        if is_small or isinstance(f, io.BytesIO):  # for another process, or a pickle
            save(obj, f, *args, **kwargs)
        elif not isinstance(f, io.IOBase):
            with torch.serialization.skip_data():
                save(obj, f, *args, **kwargs)
        # Skip open files (torch.distributed.checkpoint's parts): they cannot have holes.

    def load_mapped(load: Callable[..., Any], f: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(f, (str, os.PathLike)) or not zipfile.is_zipfile(f):
            return load(f, *args, **kwargs)
        kwargs["mmap"] = True  # its bytes are not needed
        # Linux refuses private maps larger than its memory; our own files need no privacy.
        is_ours = Path(f).resolve().is_relative_to(os.environ["TRAINER_PLUGINS_DRYCUDA"])
        flags = mmap.MAP_SHARED if is_ours else mmap.MAP_PRIVATE
        with torch.serialization.set_default_mmap_options(flags):
            return load(f, *args, **kwargs)

    for module in (torch, torch.serialization):
        Patches().wrap(module, "save", save_holes)
        Patches().wrap(module, "load", load_mapped)


def load_no_parts() -> None:
    """Make torch.distributed.checkpoint read only its own tensors: `save_holes` wrote the rest."""
    if has_numbers():
        return
    from torch.distributed.checkpoint import default_planner, utils
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    def begin(
        wrapped: Callable[..., None], wrapper: Any, group: Any, used: bool, rank: int
    ) -> None:
        wrapped(wrapper, group, used and not is_alone(), rank)

    def check(wrapped: Callable[..., Any], plans: Any, metadata: Any) -> Any:
        if is_alone():  # the parts of the other ranks are missing
            return wrapped([], replace(metadata, state_dict_metadata={}))
        return wrapped(plans, metadata)

    Patches().wrap(utils._DistWrapper, "__init__", begin)
    Patches().wrap(default_planner, "_validate_global_plan", check)

    def read(read_data: Callable[..., Any], reader: Any, plan: Any, planner: Any) -> Any:
        left = []
        for item in plan.items:
            if reader.storage_data[item.storage_index].length:
                left.append(item)
            else:
                planner.commit_tensor(item, planner.resolve_tensor(item))
        return read_data(reader, replace(plan, items=left), planner)

    Patches().wrap(FileSystemReader, "read_data", read)


def save_holes() -> None:
    """Make safetensors write holes, unless this process computes numbers."""
    if has_numbers():
        return

    # During its import, its package does not have the module as an attribute yet.
    sys.modules["safetensors.torch"].save_file = write_holes  # type: ignore[attr-defined]


def protect_arguments() -> None:
    """Make TrainingArguments write to scratch, report nowhere, and apply a search's changes."""
    from transformers.training_args import TrainingArguments

    first: list[int] = []  # TRL builds its arguments from others, which are changed already

    def post_init(made: Callable[[Any], None], args: Any) -> None:
        changed = json.loads(os.environ.get("TRAINER_PLUGINS_DRY_CHANGED") or "{}")
        args.push_to_hub = False
        args.report_to = "none"
        first.append(own := args.per_device_eval_batch_size)
        is_changed = "per_device_eval_batch_size" in changed
        args.rows_of_evaluation = first[0] if is_changed else own
        for name, value in changed.items():
            setattr(args, name, value)
        if args.output_dir:
            scratch = Path(os.environ["TRAINER_PLUGINS_DRYCUDA"]) / "output"
            folder = scratch / Path(args.output_dir).name
            folder.mkdir(parents=True, exist_ok=True)
            args.output_dir = str(folder)
        made(args)

    Patches().wrap(TrainingArguments, "__post_init__", post_init)
