"""Names the addresses of parameters, gradients and optimizer states, and counts parameters."""

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch


class Namer:
    """Names the tensors of a Trainer's model at their current addresses."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._of_model: list[tuple[str, torch.Tensor]] = []

    def names_of(self, what: str) -> tuple[int, dict[int, tuple[str, str]]]:
        """Name the `weights`, first, then the `gradients` or `optimizer states`.

        Returns the time in microseconds, and by address the category and name of the tensor.
        """
        if what == "weights":  # the model is wrapped by then; naming one takes as long as a layer
            model = self._trainer.model
            self._of_model = [*model.named_parameters(), *model.named_buffers()]
        found = {}
        for category, name, tensor in self._tensors(what):
            for local in _dense_parts(getattr(tensor, "_local_tensor", tensor)):  # for a DTensor
                if local.is_cuda and local.numel():
                    found[local.data_ptr()] = (category, name)
        return time.time_ns() // 1000, found

    def _tensors(self, what: str) -> Iterator[tuple[str, str, torch.Tensor]]:
        for name, parameter in self._of_model:
            if what == "weights":
                held = getattr(parameter, "ds_tensor", parameter)  # for ZeRO-3
                yield what if parameter.requires_grad else "frozen weights", name, held
            elif what == "gradients" and parameter.grad is not None:
                yield what, name, parameter.grad
        engine = getattr(getattr(self._trainer, "vllm_generation", None), "held", None)
        if what == "weights" and isinstance(engine, torch.Tensor):  # the stand-in for vLLM
            yield "vLLM", "", engine
        if what != "optimizer states":
            return
        names = {parameter: name for name, parameter in self._of_model}
        for parameter, states in getattr(self._trainer.optimizer, "state", {}).items():
            for state in states.values() if isinstance(states, Mapping) else ():
                if isinstance(state, torch.Tensor):
                    yield what, names.get(parameter, ""), state


def _dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that hold the memory of a gradient of `Embedding(sparse=True)`."""
    return [tensor._values(), tensor._indices()] if tensor.layout is torch.sparse_coo else [tensor]


def count_parameters(model: Any) -> tuple[int, int]:
    """Return the numbers of all and of trainable parameters of a model."""
    sizes = [(_numel(one), one.requires_grad) for one in model.parameters()]
    return sum(num for num, _ in sizes), sum(num for num, trained in sizes if trained)


def _numel(parameter: Any) -> int:
    """Return the size of a parameter: ZeRO-3 leaves it empty, and bitsandbytes packs it."""
    packed = getattr(parameter, "quant_state", None)
    whole = math.prod(packed.shape) if packed is not None else parameter.numel()
    return int(getattr(parameter, "ds_numel", whole))
