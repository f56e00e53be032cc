"""Snapshot: what an attempt moves besides gradients, to be put back before the next one."""

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Trainer

# Where TRL's trainers collect what they log: lists by name, under "train" and "eval". The second is
# that of trl < 1.0.
_METRICS = ("_metrics", "_stored_metrics")

_SMALL = 1 << 16


class Snapshot:
    """The random generators of Python, numpy, torch and the device, and what a TRL trainer has counted."""

    def __init__(self, trainer: Trainer, mode: str = "train") -> None:
        self._trainer, self._mode = trainer, mode
        self._cpu, self._numpy, self._python = (
            torch.get_rng_state(),
            np.random.get_state(),
            random.getstate(),
        )
        device = trainer.args.device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._card = self._module.get_rng_state(device) if self._module else None
        self._num_tokens = getattr(trainer, "_total_train_tokens", None)
        self._ends = [
            {name: (len(values), values[-1]) for name, values in metrics.items() if values}
            for metrics in self._metrics()
        ]

    def restore(self) -> None:
        """As if what came after had not been."""
        torch.set_rng_state(self._cpu)
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        if self._module:
            self._module.set_rng_state(self._card, self._trainer.args.device)
        self.restore_metrics()

    def restore_metrics(self) -> None:
        """As if what came after had not been counted."""
        if self._num_tokens is not None:
            self._trainer._total_train_tokens = self._num_tokens
        for metrics, ends in zip(self._metrics(), self._ends, strict=True):
            for name in list(metrics):
                if name in ends:
                    length, last = ends[name]
                    metrics[name][length - 1 :] = [last]
                else:
                    del metrics[name]

    def _metrics(self) -> list[dict[str, list[Any]]]:
        if not any(kind.__module__.startswith("trl.") for kind in type(self._trainer).__mro__):
            return []  # a Trainer of the user's own may call something else so
        return [
            vars(self._trainer)[name][self._mode]
            for name in _METRICS
            if name in vars(self._trainer)
        ]


class Buffers:
    """The small buffers of a model, such as running statistics.

    Large ones are tables and masks, which stay.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (module, name, buffer, buffer._version, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
            if buffer.numel() <= _SMALL
        ]

    def restore(self) -> None:
        """As they were: those that were changed, and those that were exchanged."""
        with torch.no_grad():
            for module, name, buffer, version, value in self._kept:
                module._buffers[name] = buffer
                if buffer._version != version:
                    buffer.copy_(value)
