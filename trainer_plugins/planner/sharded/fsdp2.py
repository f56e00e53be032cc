"""Run FSDP2 by torch's own `fully_shard`, on tensors without bytes. Imports torch.

It is called by accelerate and the Trainer, as in a real run.
"""

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from trainer_plugins.planner.sharded.fsdp import Fsdp, Patch, address
from trainer_plugins.planner.tracing.trace import Tracker


class Fsdp2(Fsdp):
    """Runs fully_shard, which keeps each parameter by itself."""

    name = "FSDP2"
    not_reliable: tuple[str, ...] = (
        "FSDP2: torch's own fully_shard gathers and reduces; checked on CPU, not on a GPU",
    )

    def patches(self, tracker: Tracker) -> Iterator[Patch]:
        for name in ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce"):
            yield _as_buffers(name, tracker)
        yield _gradients_are_known(tracker)
        yield from meshes_have_values()
        yield from _parameters_have_addresses()


def _as_buffers(name: str, tracker: Tracker) -> Patch:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as module

    original = getattr(module, name)

    def counted(*args: object, **kwargs: object) -> object:
        with tracker.as_category("sharding buffers"):
            return original(*args, **kwargs)

    return patch.object(module, name, counted)


def _gradients_are_known(tracker: Tracker) -> Patch:
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


def meshes_have_values() -> Iterator[Patch]:
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


def _parameters_have_addresses() -> Iterator[Patch]:
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
