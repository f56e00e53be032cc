"""Run FSDP1 by torch's own FullyShardedDataParallel, on tensors without bytes."""

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.patched import Patches
from trainer_plugins.planner.one_card import bare_optimizer, tag_states
from trainer_plugins.planner.sharded.fsdp2 import Fsdp, keeps_full_states, ranks_that_keep
from trainer_plugins.planner.sharded.ranks import address, addresses_are, makes_buffers
from trainer_plugins.planner.tracing.kernels import Operator, OperatorArgs, OperatorKwargs
from trainer_plugins.planner.tracing.trace import Tracker


class Fsdp1(Fsdp):
    """Keeps the weights of a layer in one flat tensor, and divides that among the cards."""

    name = "FSDP1"
    not_reliable = (
        "FSDP1: we assume kernels run as late as its rate limiter allows; two published runs on "
        "eight H100 reserved what this gives (torchtitan#165)",
    )

    def patch(self, patches: Patches, tracker: Tracker) -> None:
        from torch.distributed.fsdp._flat_param import FlatParamHandle

        super().patch(patches, tracker)
        _storages_have_addresses(patches)
        for name in ("init_flat_param_attributes", "pre_unshard"):
            makes_buffers(patches, tracker, FlatParamHandle, name)
        _gradients_are_known(patches, tracker)
        _views_keep_their_stream(patches, tracker)
        _wrapped_at_load(patches, tracker)
        _readers_are_known(patches, tracker)
        # changes two numbers in place; without bytes, their shapes are compared
        patches.set(torch, "_amp_update_scale_", lambda scale, *_: scale)
        patches.enter_context(_GradientsOfViews(tracker))

    def save(self, trainer: HfTrainer, tracker: Tracker) -> None:
        """Make what a save writes: the model; unless `save_only_model`, it again and the states."""
        with tracker.during("save"):
            _save(trainer, tracker)

    def resume(self, trainer: HfTrainer, tracker: Tracker) -> None:
        """Load the model and the optimizer's states into the flat parameters, as resuming does."""
        from accelerate.utils import load_fsdp_model, load_fsdp_optimizer

        optimizer, accelerator, model = bare_optimizer(trainer), trainer.accelerator, trainer.model
        if optimizer is None or trainer.args.save_only_model:
            return
        with tracker.during("save"):  # for the shapes of what is in the files
            files = _save(trainer, tracker)
        optimizer.state.clear()  # a new optimizer has no states
        plugin = accelerator.state.fsdp_plugin
        with (
            tracker.during("resume"),
            Patches() as patches,
            tracker.host.in_ranks(ranks_that_keep(trainer, tracker)),
            tempfile.TemporaryDirectory() as folder,
        ):
            files.are_read(patches, tracker)
            load_fsdp_model(plugin, accelerator, model, folder, adapter_only=True)
            load_fsdp_optimizer(plugin, accelerator, trainer.optimizer, model, folder)
            tag_states(optimizer, tracker)


def _storages_have_addresses(patches: Patches) -> None:
    """Compare storages by the object behind them, as there are no addresses of bytes."""
    from torch.distributed.fsdp import _flat_param, _runtime_utils

    def same(one: torch.Tensor, other: torch.Tensor) -> bool:
        return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)

    def allocated(tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().nbytes() > 0

    patches.set(_flat_param, "_same_storage", same)
    patches.set(_flat_param, "_data_ptr_allocated", allocated)
    patches.surround(_runtime_utils, "_catch_all_reshard", lambda: addresses_are(address))


def _readers_are_known(patches: Patches, tracker: Tracker) -> None:
    """Note which other streams read a tensor; another device than CUDA has one stream."""

    def noted(tensor: torch.Tensor, stream: Any) -> None:
        if tracker.device == "cuda":
            tracker.read_by(tensor, stream.stream_id)

    patches.set(torch.Tensor, "record_stream", noted)


def _views_keep_their_stream(patches: Patches, tracker: Tracker) -> None:
    """Let a layer's gradients be joined in the stream of its gather: there its views are made."""
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    def unaligned(views: Callable[..., Iterable[torch.Tensor]], *of: object) -> Any:
        return iter(aligned(views, *of))

    def aligned(views: Callable[..., Iterable[torch.Tensor]], *of: object) -> list[torch.Tensor]:
        made = [*views(*of)]
        for each in made:
            tracker.streams.keep(each.grad_fn)
        return made

    patches.wrap(FlatParamHandle, "_get_unflat_views_aligned", aligned)
    patches.wrap(FlatParamHandle, "_get_unflat_views_unaligned", unaligned)


def _gradients_are_known(patches: Patches, tracker: Tracker) -> None:
    """Tag what is reduced, its result, and full gradients that wait for the next micro-batch."""
    from torch.distributed.fsdp import _runtime_utils

    def told(original: Callable[..., object], state: object, handle: Any, *args: object) -> object:
        with tracker.as_category("sharding buffers"):
            result = original(state, handle, *args)
        flat = handle.flat_param
        tracker.tag((flat.grad, getattr(flat, "_saved_grad_shard", None)), "gradients")
        return result

    patches.wrap(_runtime_utils, "_post_backward_hook", told)


class _GradientsOfViews(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tags gradients of single parameters, and the flat one into which autograd joins them."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracker = tracker

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Iterable[type],
        args: OperatorArgs = (),
        kwargs: OperatorKwargs | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cat.default and _is_in_a_split():
            self._tracker.tag((*args[0], result), "gradients")
        return result


def _is_in_a_split() -> bool:
    core: Any = torch._C
    node = core._current_autograd_node()
    return node is not None and node.name().startswith("Split")


def _wrapped_at_load(patches: Patches, tracker: Tracker) -> None:
    """Count as load what the wrapping takes, layer by layer, and note full parameters."""
    from accelerate import Accelerator
    from torch.distributed.fsdp import FullyShardedDataParallel

    def prepared(original: Callable[..., Any], *args: object, **kwargs: object) -> object:
        with tracker.during("load"):
            model = original(*args, **kwargs)
        for unit in FullyShardedDataParallel.fsdp_modules(model):
            if (flat := getattr(unit, "_flat_param", None)) is None:
                continue
            # the elements of parameters before they are joined, padded and divided
            flat.whole_numel = sum(flat._numels)
            params = flat._params or ()
            for parameter, numel in zip(params, flat._numels, strict=bool(params)):
                parameter.whole_numel = numel
        return model

    patches.wrap(Accelerator, "prepare_model", prepared)


def _save(trainer: HfTrainer, tracker: Tracker) -> "_Files":
    """Save without files. Returns what would be in them."""
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

    files, model, accelerator = _Files(), trainer.model, trainer.accelerator
    plugin = accelerator.state.fsdp_plugin
    with (
        tracker.host.in_ranks(ranks_that_keep(trainer, tracker)),
        tempfile.TemporaryDirectory() as folder,
        Patches() as patches,
    ):
        files.are_written(patches)
        _other_ranks_have_states(patches)
        if keeps_full_states(trainer):
            accelerator.get_state_dict(model)
        if not trainer.args.save_only_model:
            save_fsdp_model(plugin, accelerator, model, folder, adapter_only=True)
            save_fsdp_optimizer(plugin, accelerator, trainer.optimizer, model, folder)
    return files


@dataclass(slots=True)
class _Files:
    """Stands for the files of a checkpoint: keeps shapes, and makes tensors of them again."""

    written: list[Any] = field(default_factory=list)

    def are_written(self, patches: Patches) -> None:
        from torch.distributed import checkpoint

        def save(content: Any, *_: object, **__: object) -> None:
            self.written.append(
                tree_map_only(
                    torch.Tensor, lambda t: partial(torch.empty, t.shape, dtype=t.dtype), content
                )
            )

        patches.set(torch, "save", save)
        patches.set(checkpoint, "save", lambda *_, **__: None)

    def are_read(self, patches: Patches, tracker: Tracker) -> None:
        """Let each read make the next file's tensors in main memory: every rank reads the first."""
        from torch.distributed import checkpoint

        readers = [tracker.host.ranks, 1]

        def read(*_: object, **__: object) -> object:
            content = self.written.pop(0)
            with tracker.host.in_ranks(readers.pop(0)):
                return tree_map_only(partial, lambda make: make(), content)

        patches.set(torch, "load", read)
        patches.set(checkpoint, "load", lambda *_, **__: None)


def _other_ranks_have_states(patches: Patches) -> None:
    """Answer for the ranks whose parts hold parameters of which the first rank has nothing.

    The ranks tell each other which ones these are: `_map_param_key_to_optim_keys` and
    `_allgather_state_info` of torch/distributed/fsdp/_optim_utils.py.
    """
    from torch.distributed.fsdp import _optim_utils as module

    of_any: list[Any] = []

    def all_keys(
        original: Callable[..., tuple[list[Any], dict[Any, Any]]],
        states: Any,
        group: Any,
        *rest: Any,
        merge_keys: bool = False,
    ) -> object:
        known, own = original(states, group, *rest, merge_keys=merge_keys)
        if not (merge_keys and states["state"]):
            return known, own
        *_, by_name = rest
        trained = (
            module._OptimStateKey(unflat_param_names=(name,), is_fsdp_managed=True)
            for name, unit in by_name.items()
            if unit.param_requires_grad[unit.param_indices[name]]
        )
        return sorted({*known, *trained}), own

    def told_by_all(
        original: Callable[..., list[dict[str, Any]]], state: Any, own: dict[str, Any]
    ) -> list[dict[str, Any]]:
        ranks = [dict(each) for each in original(state, own)]
        of_any.extend(each for each in ranks[0].values() if each.tensors)
        for name, has in own.items():
            if not has and of_any:
                ranks[-1][name] = of_any[0]
        return ranks

    patches.wrap(module, "_map_param_key_to_optim_keys", all_keys)
    patches.wrap(module, "_allgather_state_info", told_by_all)
