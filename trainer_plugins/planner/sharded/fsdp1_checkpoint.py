"""Save and resume under FSDP1 by accelerate's own functions, without files. Imports torch."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_map_only

from trainer_plugins.planner.tracing.trace import Tracker
from trainer_plugins.planner.trainer import TrainerLike, bare_optimizer


def save(trainer: TrainerLike, tracker: Tracker) -> None:
    """Make what a save writes: the model, and unless `save_only_model`, it again and the states.

    transformers/trainer.py, save_model and _save_optimizer_and_scheduler.
    """
    with tracker.during("save"):
        _saved(trainer, tracker)


def resume(trainer: TrainerLike, tracker: Tracker) -> None:
    """Load the model and the optimizer's states into the flat parameters, as resuming does.

    transformers/trainer.py, _load_from_checkpoint and _load_optimizer_and_scheduler.
    """
    from accelerate.utils import load_fsdp_model, load_fsdp_optimizer

    optimizer = bare_optimizer(trainer)
    if optimizer is None or trainer.args.save_only_model:
        return
    with tracker.during("save"):  # for the shapes of what is in the files
        files = _saved(trainer, tracker)
    optimizer.state.clear()  # a new optimizer has no states
    plugin, model = _plugin(trainer), trainer.model
    with (
        tracker.during("resume"),
        files.are_read(tracker),
        tracker.host.in_ranks(_ranks_that_keep(trainer, tracker)),
        tempfile.TemporaryDirectory() as folder,
    ):
        load_fsdp_model(plugin, trainer.accelerator, model, folder, adapter_only=True)
        load_fsdp_optimizer(plugin, trainer.accelerator, trainer.optimizer, model, folder)
        states = (value for state in optimizer.state.values() for value in state.values())
        tracker.tag(
            (value for value in states if isinstance(value, torch.Tensor)), "optimizer states"
        )


def _saved(trainer: TrainerLike, tracker: Tracker) -> "_Files":
    """Save without files. Returns what would be in them."""
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

    files, plugin, model = _Files(), _plugin(trainer), trainer.model
    with (
        tracker.host.in_ranks(_ranks_that_keep(trainer, tracker)),
        tempfile.TemporaryDirectory() as folder,
        files.are_written(),
        _other_ranks_have_states(),
    ):
        if _is_whole(plugin):
            trainer.accelerator.get_state_dict(model)
        if not trainer.args.save_only_model:
            save_fsdp_model(plugin, trainer.accelerator, model, folder, adapter_only=True)
            save_fsdp_optimizer(plugin, trainer.accelerator, trainer.optimizer, model, folder)
    return files


def _plugin(trainer: TrainerLike) -> Any:
    state: Any = trainer.accelerator.state
    return state.fsdp_plugin


def _is_whole(plugin: Any) -> bool:
    return "FULL" in str(plugin.state_dict_type)


def _ranks_that_keep(trainer: TrainerLike, tracker: Tracker) -> int:
    return 1 if _is_whole(_plugin(trainer)) else tracker.host.ranks


@dataclass(slots=True)
class _Files:
    """Stands for the files of a checkpoint: keeps shapes, and makes tensors of them again."""

    written: list[Any] = field(default_factory=list)

    @contextlib.contextmanager
    def are_written(self) -> Iterator[None]:
        from torch.distributed import checkpoint

        with (
            patch.object(torch, "save", lambda content, *_, **__: self._keep(content)),
            patch.object(checkpoint, "save", lambda *_, **__: None),
        ):
            yield

    @contextlib.contextmanager
    def are_read(self, tracker: Tracker) -> Iterator[None]:
        """Let each read make tensors in main memory, in the order of the files.

        A file with the whole model is the first, and every rank reads it.
        """
        from torch.distributed import checkpoint

        readers = [tracker.host.ranks, 1]

        def read(*_: object, **__: object) -> object:
            with tracker.host.in_ranks(readers.pop(0)):
                return self._made(self.written.pop(0))

        with (
            patch.object(torch, "load", read),
            patch.object(checkpoint, "load", lambda *_, **__: None),
        ):
            yield

    def _keep(self, content: Any) -> None:
        self.written.append(
            tree_map_only(torch.Tensor, lambda each: _Shape(each.shape, each.dtype), content)
        )

    def _made(self, content: Any) -> Any:
        return tree_map_only(_Shape, lambda each: torch.empty(each.size, dtype=each.dtype), content)


@dataclass(frozen=True, slots=True)
class _Shape:
    size: torch.Size
    dtype: torch.dtype


@contextlib.contextmanager
def _other_ranks_have_states() -> Iterator[None]:
    """Answer for the ranks whose parts hold parameters of which the first rank has nothing.

    Of one flat parameter, a rank has the states of those parameters that lie in its part. Which
    ones these are, the ranks tell each other: `_map_param_key_to_optim_keys` and
    `_allgather_state_info` of torch/distributed/fsdp/_optim_utils.py.
    """
    from torch.distributed.fsdp import _optim_utils as module

    keys: Callable[..., tuple[list[Any], dict[Any, Any]]] = module._map_param_key_to_optim_keys
    told: Callable[..., list[dict[str, Any]]] = module._allgather_state_info
    of_any: list[Any] = []

    def all_keys(states: Any, group: Any, *rest: Any, merge_keys: bool = False) -> object:
        known, own = keys(states, group, *rest, merge_keys=merge_keys)
        if not (merge_keys and states["state"]):
            return known, own
        *_, by_name = rest
        trained = (
            module._OptimStateKey(unflat_param_names=(name,), is_fsdp_managed=True)
            for name, unit in by_name.items()
            if unit.param_requires_grad[unit.param_indices[name]]
        )
        return sorted({*known, *trained}), own

    def told_by_all(state: Any, own: dict[str, Any]) -> list[dict[str, Any]]:
        ranks = [dict(each) for each in told(state, own)]
        of_any.extend(each for each in ranks[0].values() if each.tensors)
        for name, has in own.items():
            if not has and of_any:
                ranks[-1][name] = of_any[0]
        return ranks

    with (
        patch.object(module, "_map_param_key_to_optim_keys", all_keys),
        patch.object(module, "_allgather_state_info", told_by_all),
    ):
        yield
