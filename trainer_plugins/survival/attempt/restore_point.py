"""Snapshot: keep what an attempt changes besides gradients, and restore it before the next one."""

import random

import numpy as np
import torch

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.survival.attempt.state import State

_METRICS = ("_metrics", "_stored_metrics")
"""Where TRL's trainers collect what they log: lists by name, under "train" and "eval".

The second is that of trl < 1.0.
"""


class RestorePoint:
    """Holds the states of all random generators, the counts of a TRL trainer, and a model's state.

    The generators are those of Python, numpy, torch and the device.
    """

    def __init__(self, trainer: HfTrainer, mode: str = "train", state: State | None = None) -> None:
        self._trainer, self._mode = trainer, mode
        self.state = state or State({})
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
        """Restore everything."""
        torch.set_rng_state(self._cpu)
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        if self._module:
            self._module.set_rng_state(self._card, self._trainer.args.device)
        self.begin_next()

    def begin_next(self) -> None:
        """Restore all but the generators, for the next part: it draws other numbers."""
        self.state.restore()
        self.restore_metrics()

    def restore_metrics(self) -> None:
        """Restore the counts alone."""
        if self._num_tokens is not None:
            vars(self._trainer)["_total_train_tokens"] = self._num_tokens
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
