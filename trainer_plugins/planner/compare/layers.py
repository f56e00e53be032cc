"""Which layers of a model are alike, and its config with fewer of them. Imports torch."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer_plugins.planner.plan import PlanError
from trainer_plugins.planner.rehearse.build import model_of
from trainer_plugins.planner.request import ConfigSource

_COUNTS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    *("num_decoder_layers", "encoder_layers", "decoder_layers"),
)
_FIRST = 3
"""Layers before those that are counted on: the first has no layer before it, and the second follows such a one."""


@dataclass(frozen=True, slots=True)
class Repetition:
    """How the layers of a model repeat."""

    num_layers: int
    period: int
    """A layer is as the one so many before it."""

    @property
    def first(self) -> int:
        """The least number of layers from which whole periods lead to all of them."""
        least = _FIRST + self.period - 1
        return least + (self.num_layers - least) % self.period

    @property
    def counts(self) -> tuple[int, int, int]:
        """Layers of the three runs from which the whole is told."""
        return (self.first, self.first + self.period, self.first + 2 * self.period)

    @property
    def num_more(self) -> int:
        """Periods that the first of them lacks."""
        return (self.num_layers - self.first) // self.period


def repetition_of(source: ConfigSource) -> Repetition | None:
    """Build the whole model, without bytes, and compare its layers; None where they do not repeat, or are few.

    Layers are alike that have the same modules, sizes, and plain attributes, but for those that
    number them.
    """
    counts = {source.config[name] for name in _COUNTS if isinstance(source.config.get(name), int)}
    if len(counts) != 1:
        return None
    (num_layers,) = counts
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model, _ = model_of(replace(source, peft=None))
    except PlanError:
        return None
    stacks = [
        [_look(layer) for layer in module]
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers
    ]
    for period in range(1, num_layers // 2):
        found = Repetition(num_layers, period)
        if sum(found.counts) >= num_layers:  # then all of them are as fast
            return None
        if stacks and all(_repeats(stack, period) for stack in stacks):
            return found
    return None


def with_layers(source: ConfigSource, num_layers: int) -> ConfigSource:
    """The same model with fewer layers; lists with an entry for each layer are cut."""
    counts = {
        name: source.config[name] for name in _COUNTS if isinstance(source.config.get(name), int)
    }
    before = max(counts.values())
    lists = {
        name: value[:num_layers]
        for name, value in source.config.items()
        if isinstance(value, list) and len(value) == before
    }
    return replace(source, config={**source.config, **dict.fromkeys(counts, num_layers), **lists})


def _repeats(stack: list[Any], period: int) -> bool:
    """From the second layer on: the first may have what all others use."""
    return all(stack[index] == stack[index - period] for index in range(1 + period, len(stack)))


def _look(layer: torch.nn.Module) -> Any:
    return [
        (
            name,
            type(module).__qualname__,
            [(key, parameter.shape) for key, parameter in module.named_parameters(recurse=False)],
            sorted(
                (key, value)
                for key, value in vars(module).items()
                if isinstance(value, (str, bool, int, float))
                and not key.endswith(("idx", "index", "layer_id"))
            ),
        )
        for name, module in layer.named_modules()
    ]
