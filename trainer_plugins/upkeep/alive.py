"""Counts what is alive on a device: by category, by module, and the largest other tensors."""

from collections import Counter
from dataclasses import replace

import torch
from torch import nn

from trainer_plugins.launch.masked import masked_text
from trainer_plugins.record.oom_record import Alive, Held, LiveModel
from trainer_plugins.upkeep.holders import graphs_held, held_by, root_modules, storage_of, tracked

_MOST_MODULES = 12
_MOST_MODELS = 6
_MOST_TENSORS = 5


def count_alive(device_type: str, allocated_bytes: int) -> Alive:
    """Walk through every object that Python tracks, an earlier run's too; takes 0.1 to 1 s.

    Of the allocator's `allocated_bytes` Python sees only a part as tensors.
    """
    ledger = _Ledger(device_type)
    models = [
        LiveModel(name=type(model).__name__, num_bytes=ledger.add_model(model))
        for model in root_modules()
    ]
    models.sort(key=lambda model: -model.num_bytes)
    for optimizer in tracked(torch.optim.Optimizer):
        ledger.add_optimizer(optimizer)
    others = ledger.others()
    counted = sum(ledger.category_bytes.values())
    largest = _masked(held_by(others))
    graphs = _masked(graphs_held(device_type, oldest=True))
    return Alive(
        category_bytes=dict(ledger.category_bytes),
        # A process has far more in main memory than tensors.
        hidden_bytes=0 if device_type == "cpu" else max(0, allocated_bytes - counted),
        module_bytes=dict(ledger.module_bytes.most_common(_MOST_MODULES)),
        models=tuple(model for model in models[:_MOST_MODELS] if model.num_bytes),
        largest=largest,
        graphs=tuple(each for each in graphs if not each.holder.startswith("a local of")),
    )


def _masked(held: list[Held]) -> tuple[Held, ...]:
    return tuple(replace(each, holder=masked_text(each.holder)) for each in held)


class _Ledger:
    """Counts each storage once, for the first category that claims it."""

    def __init__(self, device_type: str) -> None:
        self.category_bytes: Counter[str] = Counter()
        self.module_bytes: Counter[str] = Counter()
        self._device_type = device_type
        self._counted: set[int] = set()
        self._module_of: dict[int, str] = {}

    def add_model(self, model: nn.Module) -> int:
        """Count a model, and return the bytes of its parameters."""
        own_bytes = 0
        for name, parameter in model.named_parameters():
            module = f"{type(model).__name__}: {_module(name)}"
            self._module_of[id(parameter)] = module
            own_bytes += self._add("parameter", parameter, module)
            if parameter.grad is not None:
                self._add("gradient", parameter.grad, module)
        for buffer in model.buffers():
            self._add("buffer", buffer)
        return own_bytes

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the states of an optimizer."""
        for parameter, state in optimizer.state.items():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    self._add("optimizer", value, self._module_of.get(id(parameter)))

    def others(self) -> list[torch.Tensor]:
        """Count all other tensors, and return the largest that are not part of a graph."""
        found = []
        for tensor in tracked(torch.Tensor):
            if issubclass(type(tensor), nn.Parameter):
                self._add("parameter", tensor)
            elif tensor.grad_fn is not None:
                self._add("activation", tensor)
            elif num_bytes := self._add("other", tensor):
                found.append((num_bytes, tensor))
        found.sort(key=lambda pair: -pair[0])
        return [tensor for _, tensor in found[:_MOST_TENSORS]]

    def _add(self, category: str, tensor: torch.Tensor, module: str | None = None) -> int:
        place = storage_of(tensor, self._device_type)
        if place is None or place[0] in self._counted:
            return 0
        address, num_bytes = place
        self._counted.add(address)
        self.category_bytes[category] += num_bytes
        if module is not None:
            self.module_bytes[module] += num_bytes
        return num_bytes


def _module(name: str) -> str:
    """Name the module of a parameter, the same for all layers.

    >>> _module("model.layers.17.mlp.up_proj.weight"), _module("lm_head.weight")
    ('model.layers.*.mlp', 'lm_head')
    """
    parts = ["*" if part.isdigit() else part for part in name.split(".")[:-1]]
    short = parts[: parts.index("*") + 2] if "*" in parts else parts[:3]
    return ".".join(short) or name
