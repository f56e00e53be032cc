"""Run FSDP1 by torch's own FullyShardedDataParallel, on tensors without bytes. Imports torch.

It is called by accelerate and the Trainer, as in a real run. Its flat parameters are real objects:
they grow and shrink by `resize_`, which the tracker sees.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_plugins.planner.sharded.fsdp import Fsdp, Patch, address
from trainer_plugins.planner.tracing.kernels import Operator, OperatorArgs, OperatorKwargs
from trainer_plugins.planner.tracing.trace import Tracker


class Fsdp1(Fsdp):
    """Keeps the weights of a layer in one flat tensor, and divides that among the cards."""

    name = "FSDP1"
    not_reliable: tuple[str, ...] = (
        "FSDP1: the card is assumed to lag as far as the rate limiter lets it; two published runs "
        "on eight H100 reserved 1.7 and 1.2 % more (torchtitan#165)",
    )

    def patches(self, tracker: Tracker) -> Iterator[Patch]:
        yield from _storages_have_addresses()
        yield from _buffers_are_known(tracker)
        yield _gradients_are_known(tracker)
        yield _wrapped_at_load(tracker)
        yield _readers_are_known(tracker)
        # changes two numbers in place; without bytes, their shapes are compared
        yield patch.object(torch, "_amp_update_scale_", lambda scale, *_: scale)
        yield _GradientsOfViews(tracker)


def _storages_have_addresses() -> Iterator[Patch]:
    """Compare storages by the object behind them, as there are no addresses of bytes.

    FSDP1 asks whether a parameter is still a view of its flat tensor, and at the end of a backward
    whether a flat parameter is divided already (`_catch_all_reshard`).
    """
    from torch.distributed.fsdp import _flat_param, _runtime_utils

    def same(one: torch.Tensor, other: torch.Tensor) -> bool:
        return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)

    def allocated(tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().nbytes() > 0

    reshard: Callable[..., None] = _runtime_utils._catch_all_reshard

    def resharded(*args: object) -> None:
        with patch.object(FakeTensor, "data_ptr", address, create=True):
            reshard(*args)

    yield patch.object(_flat_param, "_same_storage", same)
    yield patch.object(_flat_param, "_data_ptr_allocated", allocated)
    yield patch.object(_runtime_utils, "_catch_all_reshard", resharded)


def _readers_are_known(tracker: Tracker) -> Patch:
    """Note which other streams read a tensor; another device than CUDA has one stream."""

    def noted(tensor: torch.Tensor, stream: Any) -> None:
        if tracker.device == "cuda":
            tracker.read_by(tensor, stream.number)

    return patch.object(torch.Tensor, "record_stream", noted)


def _buffers_are_known(tracker: Tracker) -> Iterator[Patch]:
    """Tag gathered flat parameters, and their copies of lower precision."""
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    owners: tuple[tuple[Any, str], ...] = (
        (FlatParamHandle, "init_flat_param_attributes"),
        (FlatParamHandle, "pre_unshard"),
    )
    for owner, name in owners:
        yield patch.object(owner, name, _as_buffers(getattr(owner, name), tracker))


def _as_buffers(original: Callable[..., object], tracker: Tracker) -> Callable[..., object]:
    def counted(*args: object, **kwargs: object) -> object:
        with tracker.as_category("sharding buffers"):
            return original(*args, **kwargs)

    return counted


def _gradients_are_known(tracker: Tracker) -> Patch:
    """Tag what is reduced, its result, and whole gradients that wait for the next micro-batch."""
    from torch.distributed.fsdp import _runtime_utils

    original: Callable[..., object] = _runtime_utils._post_backward_hook

    def told(state: object, handle: Any, *args: object) -> object:
        with tracker.as_category("sharding buffers"):
            result = original(state, handle, *args)
        flat = handle.flat_param
        tracker.tag((flat.grad, getattr(flat, "_saved_grad_shard", None)), "gradients")
        return result

    return patch.object(_runtime_utils, "_post_backward_hook", told)


class _GradientsOfViews(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tags gradients of single parameters, and the flat one into which autograd joins them.

    A flat parameter is split into views in the forward. The backward of the split takes all their
    gradients, and makes one tensor of them.
    """

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
        if func is torch.ops.aten.cat.default and _is_of_a_split():
            self._tracker.tag((*args[0], result), "gradients")
        return result


def _is_of_a_split() -> bool:
    core: Any = torch._C
    node = core._current_autograd_node()
    return node is not None and node.name().startswith("Split")


def _wrapped_at_load(tracker: Tracker) -> Patch:
    """Count as load what the wrapping takes, layer by layer, and note whole parameters."""
    from accelerate import Accelerator
    from torch.distributed.fsdp import FullyShardedDataParallel

    original: Callable[..., Any] = Accelerator.prepare_model

    def prepared(*args: object, **kwargs: object) -> object:
        with tracker.during("load"):
            model = original(*args, **kwargs)
        for unit in FullyShardedDataParallel.fsdp_modules(model):
            if (flat := getattr(unit, "_flat_param", None)) is not None:
                _note_whole_sizes(flat)
        return model

    return patch.object(Accelerator, "prepare_model", prepared)


def _note_whole_sizes(flat: Any) -> None:
    """Note how many elements parameters have before they are joined, padded and divided."""
    flat.whole_numel = sum(flat._numels)
    for parameter, numel in zip(flat._params or (), flat._numels, strict=bool(flat._params)):
        parameter.whole_numel = numel
