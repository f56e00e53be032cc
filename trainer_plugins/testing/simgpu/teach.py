"""Teaches other libraries about simgpu while it is enabled, because they list devices by name.

Three functions are replaced: `is_torch_bf16_gpu_available` of transformers, which would refuse
bf16; accelerate's `clear_device_cache`, which now empties simgpu's cache too; and its
`PartialState._prepare_backend`: without an answer every rank trains alone, and with `use_cpu=True`
`ACCELERATE_TORCH_DEVICE` would put batches on simgpu and leave the model on the CPU.
"""

import functools
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any


def teach_libraries() -> None:
    """Teach modules that are imported already, and the others when they are imported."""
    for name, teach in _LESSONS.items():
        if name in sys.modules:
            teach(sys.modules[name])
    sys.meta_path.insert(0, _AfterImport())


def _teach_bf16(module: types.ModuleType) -> None:
    _replace(module, "is_torch_bf16_gpu_available", lambda original: lambda: True)


def _teach_clear_device_cache(module: types.ModuleType) -> None:
    import torch

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def clear_device_cache(*args: object, **kwargs: object) -> None:
            original(*args, **kwargs)
            torch.accelerator.empty_cache()

        return clear_device_cache

    _replace(module, "clear_device_cache", wrap)


def _teach_distributed(module: types.ModuleType) -> None:
    original = module.PartialState._prepare_backend

    @functools.wraps(original)
    def prepare_backend(
        self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str | None, Any]:
        if cpu and self.device is not None and self.device.type == "simgpu":
            self.device = None  # to be chosen as if ACCELERATE_TORCH_DEVICE were not set
        if not cpu and int(os.environ.get("LOCAL_RANK", "-1")) != -1:
            return backend or "gloo", module.DistributedType.MULTI_GPU
        result: tuple[str | None, Any] = original(self, cpu, sagemaker_dp, backend)
        return result

    module.PartialState._prepare_backend = prepare_backend


_LESSONS: dict[str, Callable[[types.ModuleType], None]] = {
    "transformers.utils.import_utils": _teach_bf16,
    "accelerate.utils.memory": _teach_clear_device_cache,
    "accelerate.state": _teach_distributed,
}


def _replace(
    module: types.ModuleType, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace a function in its module and wherever it has been imported from there by name."""
    original = getattr(module, name)
    taught = wrap(original)
    for other in [module, *sys.modules.values()]:
        if getattr(other, "__dict__", {}).get(name) is original:
            setattr(other, name, taught)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds the modules to teach as Python would, and teaches each after its code has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        teach = _LESSONS.get(fullname)
        if teach is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_teach(module: types.ModuleType) -> None:
            execute(module)
            teach(module)

        spec.loader.exec_module = execute_and_teach  # type: ignore[method-assign]
        return spec
