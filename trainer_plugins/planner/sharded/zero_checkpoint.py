"""Save and resume under ZeRO by DeepSpeed's own engine, without files. Imports torch."""

import contextlib
import gc
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from trainer_plugins.patched import Patches
from trainer_plugins.planner.one_card import mapped
from trainer_plugins.planner.tracing.host_tensors import key_of
from trainer_plugins.planner.tracing.trace import Tracker

_Content: TypeAlias = Any  # what a file holds: dictionaries and lists of tensors and other values

_RANK, _STATES = re.compile(r"zero_pp_rank_\d+_"), "_optim_states.pt"
_OF_STAGES_1_AND_2 = "mp_rank_"  # the first rank alone writes it, and all ranks read it
_WHOLE_MODEL_STAGE = 3


@dataclass(frozen=True, slots=True)
class _Saved:
    """Describes a tensor in a file, which holds each storage once and whole, as torch writes it."""

    storage: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Files:
    """Stands for the files of a checkpoint: what is in them, without the bytes."""

    def __init__(self, tracker: Tracker) -> None:
        self._host = tracker.host
        self._contents: dict[str, _Content] = {}
        self.are_read_in_turn = False  # a rank of the node waits for the one before

    def write(self, content: _Content, path: str) -> None:
        """Copy each storage that is on the card to the host, one after the other: torch.save."""
        seen: set[int] = set()

        def described(tensor: torch.Tensor) -> _Saved:
            storage = tensor.untyped_storage()
            key, num_bytes = key_of(storage), storage.nbytes()
            if key not in seen and tensor.device.type != "cpu":
                torch.empty(num_bytes, dtype=torch.uint8)
            seen.add(key)
            shape, offset = tuple(tensor.shape), int(tensor.storage_offset())
            return _Saved(key, num_bytes, tensor.dtype, shape, tensor.stride(), offset)

        is_of_the_model = Path(path).name.startswith(_OF_STAGES_1_AND_2)
        with self._host.in_ranks(1 if is_of_the_model else self._host.ranks):
            self._contents[path] = mapped(content, torch.Tensor, described)
        Path(path).touch()  # the engine looks for its names

    def read(self, path: str) -> _Content:
        """Make the tensors of a file on the host: those of other ranks have the same sizes."""
        storages: dict[int, torch.Tensor] = {}

        def made(saved: _Saved) -> torch.Tensor:
            if saved.storage not in storages:
                storages[saved.storage] = torch.empty(saved.num_bytes, dtype=torch.uint8)
            whole = storages[saved.storage].view(saved.dtype)
            return whole.as_strided(saved.shape, saved.stride, saved.offset)

        content = self._contents[_RANK.sub("zero_pp_rank_0_", path)]
        ranks = 1 if self.are_read_in_turn and path.endswith(_STATES) else self._host.ranks
        with self._host.in_ranks(ranks):
            return mapped(content, _Saved, made)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Let engines of DeepSpeed write and read here."""
        from deepspeed.runtime.checkpoint_engine import torch_checkpoint_engine

        def save(_: object, state_dict: _Content, path: str) -> None:
            self.write(state_dict, path)

        def load(_: object, path: str, map_location: object = None) -> _Content:
            return self.read(path)

        with Patches() as patches:
            patches.set(torch_checkpoint_engine.TorchCheckpointEngine, "save", save)
            patches.set(torch_checkpoint_engine.TorchCheckpointEngine, "load", load)
            yield


def save_and_resume(trainer: Any, tracker: Tracker) -> None:
    """Let the engine save the states of this rank, and read them as in a new process."""
    from transformers.integrations.deepspeed import deepspeed_load_checkpoint

    engine = trainer.model_wrapped
    if why_not_resumed(engine) is not None:
        return
    files, folder = _Files(tracker), Path(trainer.args.output_dir) / "checkpoint"
    folder.mkdir(parents=True, exist_ok=True)
    with tracker.during("save"), files.in_place():
        trainer._save_optimizer_and_scheduler(str(folder))
    kept_bytes = _forget_states(engine)
    gc.collect()  # DeepSpeed's function that gathers weights holds itself, and what it gathered
    with tracker.during("resume"), files.in_place(), contextlib.ExitStack() as stack:
        if _ranks_take_turns(engine):
            files.are_read_in_turn = True
            stack.enter_context(_others_are_done(kept_bytes, tracker))
        # not strict, as for an adapter, whose checkpoint leaves its base out
        deepspeed_load_checkpoint(engine, str(folder), load_module_strict=False)
        states = [*engine.optimizer.optimizer.state.values()]
        tracker.tag((each for state in states for each in state.values()), "optimizer states")


def why_not_resumed(engine: Any) -> str | None:
    """Name what this engine's checkpoint has that is not planned; None if it is planned."""
    if engine.load_universal_checkpoint():
        return "resuming from a universal checkpoint (checkpoint.load_universal)"
    stage = engine.zero_optimization_stage()
    if _ranks_take_turns(engine) and stage != _WHOLE_MODEL_STAGE:
        return (
            f"resuming with pipeline_loading_checkpoint, which DeepSpeed refuses at stage {stage}"
        )
    if _ranks_take_turns(engine) and engine.world_size > int(os.environ["LOCAL_WORLD_SIZE"]):
        return (
            "resuming with pipeline_loading_checkpoint on several machines, where DeepSpeed's last "
            "rank sends to one that does not exist"
        )
    if not engine.zero_elastic_checkpoint():
        return None
    if stage == _WHOLE_MODEL_STAGE:
        return "resuming with elastic_checkpoint, with which DeepSpeed saves nothing at stage 3"
    if "step" not in engine.optimizer.optimizer.param_groups[0]:
        kind = type(engine.optimizer.optimizer).__name__
        return (
            f"resuming with elastic_checkpoint: of {kind} DeepSpeed saves no step, and ends with "
            "an AssertionError when it reads the checkpoint"
        )
    return None


def _ranks_take_turns(engine: Any) -> bool:
    return bool(getattr(engine._config.zero_config, "pipeline_loading_checkpoint", False))


def _forget_states(engine: Any) -> int:
    """Drop what an engine has from its steps, and return the bytes of that on the host.

    Weights of stages 1 and 2 hold states too (deepspeed/utils/mixed_precision_linkage.py).
    """
    optimizer = engine.optimizer.optimizer
    values = [each for state in optimizer.state.values() for each in state.values()]
    on_host = [
        each.nbytes
        for each in values
        if isinstance(each, torch.Tensor) and each.device.type == "cpu"
    ]
    optimizer.state.clear()
    for weight in engine.module.parameters():
        if (part := getattr(weight, "_hp_mapping", None)) is not None:
            part.optim_fragment = None
    return sum(on_host)


@contextlib.contextmanager
def _others_are_done(kept_bytes: int, tracker: Tracker) -> Iterator[None]:
    """Let the other ranks of the node hold what they have read and keep: this one is the last."""
    with tracker.host.in_ranks(tracker.host.ranks - 1):
        kept = torch.empty(kept_bytes, dtype=torch.uint8)
    yield
    del kept
