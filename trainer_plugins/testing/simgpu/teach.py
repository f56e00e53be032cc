"""Teach other libraries about simgpu while it is enabled, because they list devices by name.

It replaces three functions: `is_torch_bf16_gpu_available` of transformers, which would refuse bf16;
accelerate's `clear_device_cache`, which now also empties simgpu's cache; and its
`PartialState._prepare_backend`: without an answer every rank trains alone, and with `use_cpu=True`
`ACCELERATE_TORCH_DEVICE` would put batches on simgpu and leave the model on the CPU.
"""

import functools
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from trainer_plugins._site.trainer_plugins_on_import import call_when_imported
from trainer_plugins.patched import Patches


def teach_libraries() -> None:
    """Teach the modules already imported, and the others on import."""
    for name in _LESSONS:
        if name in sys.modules:
            _teach(name)
        else:
            call_when_imported(name, functools.partial(_teach, name))


def _teach(name: str) -> None:
    _LESSONS[name](sys.modules[name])


def _teach_clear_device_cache(module: types.ModuleType) -> None:
    import torch

    clear_device_cache = module.clear_device_cache

    def clear_ours_too(*args: object, **kwargs: object) -> None:
        clear_device_cache(*args, **kwargs)
        torch.accelerator.empty_cache()

    _replace(module, "clear_device_cache", clear_ours_too)


def _teach_distributed(module: types.ModuleType) -> None:
    def prepare_backend(
        original: Callable[..., object],
        self: Any,
        cpu: bool = False,
        sagemaker_dp: bool = False,
        backend: str | None = None,
    ) -> object:
        if cpu and self.device is not None and self.device.type == "simgpu":
            self.device = None  # chosen as if ACCELERATE_TORCH_DEVICE were not set
        if not cpu and int(os.environ.get("LOCAL_RANK", "-1")) != -1:
            return backend or "gloo", module.DistributedType.MULTI_GPU
        return original(self, cpu, sagemaker_dp, backend)

    Patches().wrap(module.PartialState, "_prepare_backend", prepare_backend)


_LESSONS: dict[str, Callable[[types.ModuleType], None]] = {
    "transformers.utils.import_utils": lambda module: _replace(
        module, "is_torch_bf16_gpu_available", lambda: True
    ),
    "accelerate.utils.memory": _teach_clear_device_cache,
    "accelerate.state": _teach_distributed,
}


def _replace(module: types.ModuleType, name: str, taught: Callable[..., object]) -> None:
    """Replace a function in its module, and wherever others imported it by name."""
    original = getattr(module, name)
    for other in [module, *sys.modules.values()]:
        if getattr(other, "__dict__", {}).get(name) is original:
            setattr(other, name, taught)
