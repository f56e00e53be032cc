"""Find which layers of a model are alike, and make its config with fewer. Imports torch."""

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer_plugins.planner.plan import PlanError
from trainer_plugins.planner.rehearse.model_of_config import model_of
from trainer_plugins.planner.request import LAYER_COUNTS, ConfigSource

_Look: TypeAlias = list[object]  # modules, sizes and plain attributes of a layer

_FIRST = 3  # the first layer that may repeat: the second follows the first


@dataclass(frozen=True, slots=True)
class Repetition:
    """Describes how the layers of a model repeat."""

    num_layers: int
    period: int  # the distance in layers from a layer to the next that is like it

    @property
    def first(self) -> int:
        """Return the least number of layers to which adding whole periods gives all of them."""
        least = _FIRST + self.period - 1
        return least + (self.num_layers - least) % self.period

    @property
    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of layers of the three runs from which the whole is extrapolated."""
        return (self.first, self.first + self.period, self.first + 2 * self.period)

    @property
    def num_more(self) -> int:
        """Return how many periods the first of these runs lacks."""
        return (self.num_layers - self.first) // self.period


def repetition_of(source: ConfigSource) -> Repetition | None:
    """Build the whole model without bytes, and compare its layers; None if few, or not alike."""
    counts = {*_counts(source).values()}
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
    """Make the config of the same model with fewer layers; lists with an entry a layer are cut."""
    counts = _counts(source)
    before = max(counts.values())
    lists = {
        name: value[:num_layers]
        for name, value in source.config.items()
        if isinstance(value, list) and len(value) == before
    }
    return replace(source, config={**source.config, **dict.fromkeys(counts, num_layers), **lists})


def _counts(source: ConfigSource) -> dict[str, int]:
    """Return the keys of a config that count layers, with their values."""
    found = {name: source.config.get(name) for name in LAYER_COUNTS}
    return {name: value for name, value in found.items() if isinstance(value, int)}


def _repeats(stack: list[_Look], period: int) -> bool:
    """Compare from the second layer on: the first may hold what all others use."""
    return all(stack[index] == stack[index - period] for index in range(1 + period, len(stack)))


def _look(layer: torch.nn.Module) -> _Look:
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
