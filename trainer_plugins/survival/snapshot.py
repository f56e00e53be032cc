"""Snapshot: what an attempt moves besides gradients, to be put back before the next one."""

from typing import Any

import torch
from transformers import Trainer

# Where TRL's trainers collect what they log: lists by name, under "train". The second name is that of trl before 1.0.
_METRICS = ("_metrics", "_stored_metrics")


class Snapshot:
    """The random generators, of the CPU and of the device, and what a TRL trainer has counted. Costs microseconds."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._cpu = torch.get_rng_state()
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
        return [vars(self._trainer)[name]["train"] for name in _METRICS if name in vars(self._trainer)]
