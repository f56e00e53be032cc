"""Kept: what a rehearsal changes, in main memory, and how it is restored bit for bit."""

import copy
import os
from typing import Any, NamedTuple

import torch
from torch import nn

from trainer_plugins.devices.host import HostDevice
from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.survival.attempt.sources import sources_of
from trainer_plugins.survival.attempt.state import RestorePoint, full_state
from trainer_plugins.survival.limit.optimizer_states import inner_optimizer
from trainer_plugins.units import size
from trainer_plugins.wrapped import local_tensor

_ROOM = 0.8  # part of the free main memory for copies: beyond it the kernel may end the run

# What of a Trainer the rows of a run and their outputs are drawn from.
SOURCES = ("train_dataset", "eval_dataset", "data_collator", "compute_metrics")


class Kept:
    """Holds what a rehearsal may change, except generators and frozen weights, to restore it."""

    def __init__(self, trainer: HfTrainer, model: nn.Module) -> None:
        optimizer = None if trainer.is_deepspeed_enabled else inner_optimizer(trainer.optimizer)
        trained = [p for p in model.parameters() if p.requires_grad]
        self._model, self._weights = model, [] if optimizer is None else trained
        _look_for_room(self._weights, optimizer)
        self._values = [_host(weight) for weight in self._weights]
        self._states = None if optimizer is None else States(optimizer)
        self._state = full_state(model, has_parameters=False)
        self._modes = [(module, module.training) for module in model.modules()]
        self._sources = sources_of(trainer, *SOURCES)
        self._metrics = [RestorePoint(trainer, mode) for mode in ("train", "eval")]
        self._owners = [(each, attributes(each)) for each in _owners(trainer)]
        self._callback_states = trainer.state.stateful_callbacks
        self._values_of_callbacks = copy.deepcopy(self._callback_states)

    def restore_weights(self) -> None:
        with torch.no_grad():
            for weight, value in zip(self._weights, self._values, strict=True):
                local_tensor(weight).copy_(value)

    def drop_states(self) -> None:
        if self._states is not None:
            self._states.drop()

    def restore(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad = None
        self.restore_weights()
        if self._states is not None:
            self._states.restore()
        self._state.restore()
        self._sources.restore()
        for module, mode in self._modes:
            module.training = mode
        for owner, before in self._owners:
            put_back(owner, before)
        self._callback_states.clear()
        self._callback_states.update(self._values_of_callbacks)
        for metrics in self._metrics:
            metrics.restore_metrics()


class States:
    """Holds the states and the groups of an optimizer, to restore them in place."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self._states = {
            parameter: {name: _Value.of(value) for name, value in state.items()}
            for parameter, state in optimizer.state.items()
        }

    def drop(self) -> None:
        self._optimizer.state.clear()

    def restore(self) -> None:
        for group, kept in zip(self._optimizer.param_groups, self._groups, strict=True):
            parameters = group["params"]
            group.clear()
            group.update({"params": parameters, **kept})
        now = dict(self._optimizer.state)
        self._optimizer.state.clear()
        for parameter, kept in self._states.items():
            there = now.get(parameter, {})
            self._optimizer.state[parameter] = {
                name: value.put_back(there.get(name)) for name, value in kept.items()
            }


class _Value(NamedTuple):
    value: Any
    device: torch.device | None

    @classmethod
    def of(cls, value: Any) -> "_Value":
        if isinstance(value, torch.Tensor):
            return cls(_host(value), value.device)
        return cls(copy.deepcopy(value), None)

    def put_back(self, now: Any) -> Any:
        if self.device is None:
            return self.value
        there = (now.dtype, now.device) if isinstance(now, torch.Tensor) else None
        if there == (self.value.dtype, self.device):
            with torch.no_grad():
                local_tensor(now).copy_(self.value)
            return now
        return self.value.to(self.device)


def put_back(owner: object, before: dict[str, Any]) -> None:
    """Give an object the attributes that it had, and remove the others."""
    there = vars(owner)
    for name in there.keys() - before.keys():
        del there[name]
    there.update(before)


def attributes(owner: object) -> dict[str, Any]:
    """Return the attributes of an object, with its lists copied."""
    return {n: [*v] if isinstance(v, list) else v for n, v in vars(owner).items()}


def _owners(trainer: HfTrainer) -> list[object]:
    generation = getattr(trainer.model, "generation_config", None)
    optional = (trainer.lr_scheduler, trainer.accelerator.scaler, generation)
    there = [each for each in optional if hasattr(each, "__dict__")]
    return [trainer, trainer.args, trainer.state, trainer.accelerator, *there]


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return local_tensor(tensor).detach().to("cpu", copy=True)


def _look_for_room(weights: list[nn.Parameter], optimizer: torch.optim.Optimizer | None) -> None:
    states = [] if optimizer is None else optimizer.state.values()
    values = [v for state in states for v in state.values() if isinstance(v, torch.Tensor)]
    local_bytes = sum(local_tensor(each).nbytes for each in (*weights, *values))
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free_bytes = HostDevice().read().free_bytes
    if num_ranks * local_bytes > _ROOM * free_bytes:
        raise MemoryError(
            f"the weights and states of {num_ranks} ranks take {size(num_ranks * local_bytes)},"
            f" and {size(free_bytes)} of main memory are free"
        )
