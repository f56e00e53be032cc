"""Run FSDP2 by torch's own `fully_shard`, on tensors without bytes. Imports torch.

It is called by accelerate and the Trainer, as in a real run.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from trainer_plugins.planner.plan import NotPredicted
from trainer_plugins.planner.pretend.eight_bit import OPTIMIZERS
from trainer_plugins.planner.pretend.optimizers import PACKAGES
from trainer_plugins.planner.request import PlanRequest
from trainer_plugins.planner.sharded.ranks import OF_NCCL, as_first_rank
from trainer_plugins.planner.tracing.trace import Tracker
from trainer_plugins.planner.trainer import TrainerLike, optimizer_name

# transformers/integrations/fsdp.py, is_fsdp_enabled: if both are true, only the first rank of a
# node loads the weights.
_ONE_LOADS = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
_Patch: TypeAlias = contextlib.AbstractContextManager[object]
_TRUE = ("1", "true", "yes", "y", "on", "t")


class Fsdp2:
    """Divides weights, gradients and optimizer states among the cards; gathers them by layer."""

    not_predicted: tuple[str, ...] = (OF_NCCL,)
    not_reliable: tuple[str, ...] = (
        "FSDP2: torch's own fully_shard gathers and reduces; checked on CPU, not on a GPU",
    )

    def __init__(self, request: PlanRequest) -> None:
        self._request = request

    @contextlib.contextmanager
    def around(self, tracker: Tracker) -> Iterator[None]:
        self._tracker = tracker
        with as_first_rank(self._request, tracker) as stack:
            self._num_local = tracker.host.ranks
            if loads_once():
                tracker.host.ranks = 1
            for name in ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce"):
                stack.enter_context(_as_buffers(name, tracker))
            stack.enter_context(_gradients_are_known(tracker))
            for each in meshes_have_values():
                stack.enter_context(each)
            for each in _parameters_have_addresses():
                stack.enter_context(each)
            yield

    def prepare(self, trainer: TrainerLike) -> None:
        refuse_optimizers(trainer, "FSDP2")
        self._tracker.host.ranks = self._num_local


def loads_once() -> bool:
    """Return whether only the first rank of a node loads the weights."""
    return all(os.environ.get(name, "").lower() in _TRUE for name in _ONE_LOADS)


def refuse_optimizers(trainer: TrainerLike, by: str) -> None:
    """Refuse all optimizers but torch's own.

    Raises:
        NotPredicted: its states are of another package.
    """
    optimizer = optimizer_name(trainer.args)
    if optimizer in OPTIMIZERS:
        raise NotPredicted(f"an optimizer of bitsandbytes ({optimizer}) under {by}")
    if optimizer in PACKAGES:
        raise NotPredicted(f"the optimizer {optimizer} under {by}")


def _as_buffers(name: str, tracker: Tracker) -> _Patch:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as module

    original = getattr(module, name)

    def counted(*args: object, **kwargs: object) -> object:
        with tracker.as_category("sharding buffers"):
            return original(*args, **kwargs)

    return patch.object(module, name, counted)


def _gradients_are_known(tracker: Tracker) -> _Patch:
    """Tag gradients that are not reduced yet: they are whole, and no parameter holds them."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    original: Callable[..., object] = FSDPParamGroup.post_backward

    def told(group: Any, *args: object, **kwargs: object) -> object:
        result = original(group, *args, **kwargs)
        for parameter in group.fsdp_params:
            whole = getattr(parameter, "_unsharded_param", None)
            kept = (
                getattr(parameter, "unsharded_accumulated_grad", None),
                getattr(whole, "grad", None),
            )
            tracker.tag((each for each in kept if each is not None), "gradients")
        return result

    return patch.object(FSDPParamGroup, "post_backward", told)


def meshes_have_values() -> Iterator[_Patch]:
    """Make each DeviceMesh with real values: it is a table of ranks, which it reads."""
    from accelerate.parallelism_config import ParallelismConfig
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    owners: tuple[tuple[Any, str], ...] = (
        (_fsdp_init, "init_device_mesh"),
        (ParallelismConfig, "build_device_mesh"),
        (DeviceMesh, "__getitem__"),
    )
    for owner, name in owners:
        yield patch.object(owner, name, on_real_tensors(getattr(owner, name)))


def on_real_tensors(original: Callable[..., object]) -> Callable[..., object]:
    """Let a function make tensors with values."""

    def made(*args: object, **kwargs: object) -> object:
        with _disable_current_modes():
            return original(*args, **kwargs)

    return made


def _parameters_have_addresses() -> Iterator[_Patch]:
    """Give fake parameters an address while accelerate needs one.

    By its address, accelerate finds the parameter of the optimizer that a sharded one replaces.
    Elsewhere an address must not be found: code that finds one copies bytes, and there are none.
    """
    from accelerate import accelerator as module

    addresses = patch.object(FakeTensor, "data_ptr", address, create=True)
    prepare, shard = module.Accelerator._prepare_fsdp2, module.fsdp2_prepare_model

    def prepared(*args: object) -> object:
        addresses.start()
        try:
            return prepare(*args)
        finally:
            addresses.stop()

    def sharded(*args: object, **kwargs: object) -> object:
        addresses.stop()
        try:
            return shard(*args, **kwargs)
        finally:
            addresses.start()

    yield patch.object(module.Accelerator, "_prepare_fsdp2", prepared)
    yield patch.object(module, "fsdp2_prepare_model", sharded)


def address(tensor: torch.Tensor) -> int:
    """Return a number that only tensors share whose elements begin at one place."""
    return int(tensor.untyped_storage()._cdata) + int(tensor.storage_offset())
