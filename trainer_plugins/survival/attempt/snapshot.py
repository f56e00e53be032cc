"""Snapshot: keep what an attempt changes besides gradients, and restore it before the next one."""

import random
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import Trainer

_METRICS = ("_metrics", "_stored_metrics")
"""Where TRL's trainers collect what they log: lists by name, under "train" and "eval".

The second is that of trl < 1.0.
"""

_SMALL = 1 << 16


class Snapshot:
    """Holds the states of all random generators, and the counts of a TRL trainer.

    The generators are those of Python, numpy, torch and the device.
    """

    def __init__(self, trainer: Trainer, mode: str = "train") -> None:
        self._trainer, self._mode = trainer, mode
        self._cpu, self._numpy = torch.get_rng_state(), np.random.get_state()
        self._python = random.getstate()
        device: torch.device = trainer.args.device
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._card = self._module.get_rng_state(device) if self._module else None
        self._num_tokens = getattr(trainer, "_total_train_tokens", None)
        self._ends = [
            {name: (len(values), values[-1]) for name, values in metrics.items() if values}
            for metrics in self._metrics()
        ]

    def restore(self) -> None:
        """Restore generators and counts."""
        torch.set_rng_state(self._cpu)
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        if self._module:
            self._module.set_rng_state(self._card, self._trainer.args.device)
        self.restore_metrics()

    def restore_metrics(self) -> None:
        """Restore the counts alone."""
        if self._num_tokens is not None:
            self._trainer._total_train_tokens = self._num_tokens
        for metrics, ends in zip(self._metrics(), self._ends, strict=True):
            for name in list(metrics):
                if name in ends:
                    length, last = ends[name]
                    metrics[name][length - 1 :] = [last]
                else:
                    del metrics[name]

    def _metrics(self) -> list[dict[str, list[object]]]:
        if not any(kind.__module__.startswith("trl.") for kind in type(self._trainer).__mro__):
            return []  # a user's own Trainer may mean something else by these names
        return [
            vars(self._trainer)[name][self._mode]
            for name in _METRICS
            if name in vars(self._trainer)
        ]


class Placed(NamedTuple):
    """Holds a buffer and where it is."""

    owner: nn.Module
    path: str
    """Name of the owner in the model."""
    name: str
    """Name of the buffer in its owner."""
    buffer: torch.Tensor


def placed_buffers(model: nn.Module, most_numbers: int) -> Iterator[Placed]:
    """Walk over the buffers of a model that hold at most so many numbers.

    Larger ones are tables and masks. A buffer that two modules share comes twice.
    """
    for path, owner in model.named_modules():
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
            if buffer.numel() <= most_numbers:
                yield Placed(owner, path, name, buffer)


class Buffers:
    """Keeps the small buffers of a model, such as running statistics, to restore them."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (one, one.buffer._version, one.buffer.detach().clone())
            for one in placed_buffers(model, _SMALL)
        ]

    def restore(self) -> None:
        """Restore those that were changed, and those that were replaced by another tensor."""
        with torch.no_grad():
            for (owner, _, name, buffer), version, value in self._kept:
                owner._buffers[name] = buffer
                if buffer._version != version:
                    buffer.copy_(value)
