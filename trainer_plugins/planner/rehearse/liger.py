"""Plan Liger's kernels by their own Python; know what they replaced before the Trainer was made."""

import functools
import importlib
import sys
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch

from trainer_plugins.planner.plan import NotPredicted
from trainer_plugins.planner.request import Replaced

_PATCHED = ("transformers.", "torch.nn.functional")


def refuse_liger(device: str) -> None:
    """Refuse Liger's kernels without their code, and on another device than CUDA."""
    if find_spec("liger_kernel") is None:
        raise NotPredicted(
            "Liger kernels without their code, which the plan runs: "
            "pip install --no-deps liger-kernel (a plan needs neither Triton nor a card)"
        )
    if device != "cuda":
        raise NotPredicted(f"Liger kernels on {device}: they need CUDA")


def said_of_liger(model: torch.nn.Module) -> str:
    """Say what a plan assumes of a model with Liger's kernels."""
    from liger_kernel.transformers import monkey_patch

    name = f"Liger {version('liger-kernel')}"
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        return f"{name} has no kernels for models of the type {kind}: the plan is without them"
    return f"{name}: its own code says what its kernels keep; see docs/plan_kernels.md"


def replaced_by_liger() -> tuple[Replaced, ...]:
    """Return what Liger has replaced in this process."""
    if "liger_kernel" not in sys.modules:
        return ()
    names = [name for name in sys.modules if name.startswith(_PATCHED)]
    return tuple(each for name in names for each in _in_module(name))


def replace_again(replaced: tuple[Replaced, ...]) -> None:
    """Replace the same in this process, permanently."""
    for module, path, (home, qualified) in replaced:
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        instead: Any = importlib.import_module(home)
        setattr(owner, name, functools.reduce(getattr, qualified.split("."), instead))


def _in_module(module: str) -> Iterator[Replaced]:
    for name, value in list(vars(sys.modules[module]).items()):
        if _is_ligers(value):
            yield Replaced(module, name, (value.__module__, value.__qualname__))
        elif isinstance(value, type) and value.__module__ == module:
            for inner, method in vars(value).items():
                if _is_ligers(method):
                    instead = (method.__module__, method.__qualname__)
                    yield Replaced(module, f"{name}.{inner}", instead)


def _is_ligers(value: object) -> bool:
    return isinstance(value, (FunctionType, type)) and value.__module__.startswith("liger_kernel.")
