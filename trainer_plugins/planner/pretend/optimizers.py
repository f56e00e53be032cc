"""Run the optimizers of other packages by their own code, on tensors without bytes."""

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from trainer_plugins.planner.plan import NotPredicted

PACKAGES = {
    **dict.fromkeys(
        ("schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"),
        ("schedulefree", "schedulefree"),
    ),
    "grokadamw": ("grokadamw", "grokadamw"),
    **dict.fromkeys(("lomo", "adalomo"), ("lomo_optim", "lomo-optim")),
    **dict.fromkeys(("apollo_adamw", "apollo_adamw_layerwise"), ("apollo_torch", "apollo-torch")),
}  # the module of each, and how to install it: transformers/trainer_optimizer.py


def let_it_be_imported(optimizer: str, settings: str) -> None:
    """Let the package of one of `PACKAGES` be imported; `settings` is `optim_args`."""
    module, package = PACKAGES[optimizer]
    if importlib.util.find_spec(module) is None:
        raise NotPredicted(
            f"the optimizer {optimizer} without its code, which the plan runs: pip install "
            f"--no-deps {package} (a plan needs no card)"
        )
    if optimizer.startswith("apollo"):
        if "svd" in settings:
            raise NotPredicted("APOLLO by singular values (proj=svd): what cuSOLVER takes")
        _let_bitsandbytes_be_imported()
        projector: Any = importlib.import_module("apollo_torch.random_projector")
        projector.stable_randn = _numbers


def _numbers(
    shape: Any,
    seed: int,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Make what APOLLO's `stable_randn` makes, without a generator, which only a card has."""
    return torch.randn(shape, device=device, dtype=dtype)


def _let_bitsandbytes_be_imported() -> None:
    """Stand in for what apollo_torch derives from; nothing here calls it."""
    if importlib.util.find_spec("bitsandbytes") is not None:
        return
    contents: dict[str, dict[str, Any]] = {
        "bitsandbytes": {},
        "bitsandbytes.functional": {},
        "bitsandbytes.optim": {},
        "bitsandbytes.optim.optimizer": {"Optimizer2State": torch.optim.Optimizer},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, loader=None)
        vars(module).update(__path__=[], **content)
        sys.modules[name] = module
