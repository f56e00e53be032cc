"""Certificate: before anything is divided, measure on a few short examples of it that gradients add up."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import Trainer

from trainer_plugins.survival.attempt import DidNotFit, attempt
from trainer_plugins.survival.finality import Watch, gradients_aside, is_reentrant, small_parameters, without_dropout
from trainer_plugins.survival.layouts import IndivisibleError, Inputs, Layout
from trainer_plugins.survival.losses import Family
from trainer_plugins.survival.marks import frozen
from trainer_plugins.survival.weights import Weight, relative_error

if TYPE_CHECKING:
    from trainer_plugins.survival.ranks.fsdp2 import FSDP2

# What rounding makes of a right weight, and less than what a wrong one does. A loss is often taken in float32, whatever
# the model is in. Right weights are off by 1e-7 in float32 and 2e-3 in bfloat16, at 16 and 28 layers.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}
_TOLERANCE_TF32 = 5e-3
_TOLERANCE_LOW = 3e-2

_EXAMPLES = (4, 3, 2)

_NO_ROOM = "there was no room to measure whether its loss can be divided ({})"

# Of a parameter that gets a hundredth of what the one with the most gets, rounding is all there may be.
_LEAST_FRACTION = 1e-2

Loss = Callable[[Inputs], torch.Tensor]
_Measure = list[torch.Tensor]
"""One tensor a parameter or a reduction, or the loss alone."""


def certify(trainer: Trainer, model: nn.Module, family: Family, layout: Layout, inputs: Inputs, loss: Loss) -> Weight:
    """The weight by which the gradients of two parts of a probe add up to that of the probe.

    Gradients and not losses: a coupled loss can be equal in value and wrong in gradient. Necessary, and no proof: the
    proof is the list in `losses.py`. Takes up to four small forward and backward passes, once; nothing is left behind
    but random numbers drawn, and metrics counted, which the caller puts back.

    Raises:
        IndivisibleError: no weight of this family fits, a part cannot be computed, or there was no room to measure.
    """
    probe = _Probe(layout, inputs)
    parameters = small_parameters(model)
    unwatched = set(model.parameters()) - set(parameters)
    with gradients_aside(model), frozen(unwatched), Watch(model) as watch:
        measured = _measured(model, lambda some: _gradient(loss, some, parameters), probe)
    return _chosen(probe.errors(family, measured), _tolerance(trainer, parameters, watch), "gradient")


def certify_together(ranks: "FSDP2", family: Family, layout: Layout, inputs: Inputs, loss: Loss) -> Weight:
    """The same where each pass is one of all ranks. A rank without two examples lends itself to the others.

    Every rank makes three passes, so all of them without dropout; and they come to the same end. There must be no
    gradient yet.

    Raises:
        IndivisibleError: as above, on every rank.
    """
    probe = _Probe(layout, inputs) if layout.count(inputs) > 1 else None
    parameters = small_parameters(ranks.model)
    unwatched = set(ranks.model.parameters()) - set(parameters)
    measured: list[_Measure] = []
    with frozen(unwatched), without_dropout(ranks.model), Watch(ranks.model) as watch:
        for some in probe or [layout.probe(inputs, 1)] * 3:
            gradient = ranks.attempt(partial(ranks.gradient, partial(loss, some)))
            if isinstance(gradient, DidNotFit):
                raise IndivisibleError(_NO_ROOM.format(gradient.first_line))
            measured.append(gradient)
    errors = probe.errors(family, measured) if probe else dict.fromkeys(family.weights, 0.0)
    together = {
        weight: ranks.highest(round(1e9 * error) if error < 1 else 10**9) / 1e9 for weight, error in errors.items()
    }
    return _chosen(together, _tolerance(ranks.trainer, parameters, watch), "gradient")


def certify_values(trainer: Trainer, family: Family, layout: Layout, inputs: Inputs, loss: Loss) -> Weight:
    """The same where no gradient is computed: the weight by which the losses add up. Three small forward passes.

    Raises:
        IndivisibleError: as above.
    """
    probe = _Probe(layout, inputs)
    with Watch(trainer.model) as watch:
        measured = _measured(trainer.model, lambda some: [loss(some).detach().cpu().double().reshape(1)], probe)
    tolerance = _tolerance(trainer, list(trainer.model.parameters()), watch)
    return _chosen(probe.errors(family, measured), tolerance, "loss")


def _measured(model: nn.Module, measure: Callable[[Inputs], list[torch.Tensor]], probe: "_Probe") -> list[_Measure]:
    """Of each part of a probe. As the model trains, where two passes agree on the same; else without its dropout."""

    def work() -> list[_Measure]:
        whole, *parts = probe
        if not is_reentrant(model):  # which torch.autograd.grad does not pass through
            first = measure(whole)
            if all(torch.equal(*pair) for pair in zip(first, measure(whole), strict=True)):
                return [first, *map(measure, parts)]
        with without_dropout(model):
            return [measure(some) for some in probe]

    try:
        measured = attempt(work)
    except Exception as error:  # the model's own, about a size or a mode that it does not meet in training
        raise IndivisibleError(f"a part of it cannot be computed: {type(error).__name__}: {error}") from error
    if isinstance(measured, DidNotFit):
        raise IndivisibleError(_NO_ROOM.format(measured.first_line))
    return measured


class _Probe:
    """A few short examples, then the first of them, then the others. Iterating gives the inputs of the three."""

    def __init__(self, layout: Layout, inputs: Inputs) -> None:
        self._num = next((num for num in _EXAMPLES if num <= layout.count(inputs)), 0)
        whole = layout.probe(inputs, self._num)
        self._inputs = (whole, layout.take(whole, 0, 1), layout.take(whole, 1, self._num))

    def __iter__(self) -> Iterator[Inputs]:
        return iter(self._inputs)

    def errors(self, family: Family, measured: list[_Measure]) -> dict[Weight, float]:
        """By each weight, how far what was measured of the parts is from that of the whole."""
        return {weight: _worst_error(measured, self._factors(weight)) for weight in family.weights}

    def _factors(self, weight: Weight) -> list[float]:
        whole, first, others = self._inputs
        total = weight.of(whole, self._num)
        return [weight.share(weight.of(first, 1), total), weight.share(weight.of(others, self._num - 1), total)]


def _chosen(errors: dict[Weight, float], tolerance: float, what: str) -> Weight:
    """The first weight by which parts add up.

    Raises:
        IndivisibleError: there is none.
    """
    for weight, error in errors.items():
        if error <= tolerance:
            return weight
    tried = ", ".join(f"{weight.name}: {error:.1e}" for weight, error in errors.items())
    raise IndivisibleError(f"its {what} is not the sum of its parts' (off by, if it is {tried})")


def _worst_error(measured: list[_Measure], factors: list[float]) -> float:
    """How far the weighted parts are from the whole, relative to it, for the parameter where they are farthest."""
    whole, *parts = measured
    least = _LEAST_FRACTION * max(float(one.norm()) for one in whole)
    pairs = zip(whole, zip(*parts, strict=True), strict=True)
    return max(relative_error(one, list(some), factors, least) for one, some in pairs)


def _gradient(loss: Loss, inputs: Inputs, parameters: list[nn.Parameter]) -> _Measure:
    with torch.enable_grad():
        gradients = torch.autograd.grad(loss(inputs), parameters, allow_unused=True)
    pairs = zip(parameters, gradients, strict=True)
    return [torch.zeros(1).double() if g is None else g.flatten().cpu().double() for p, g in pairs]


def _tolerance(trainer: Trainer, parameters: list[nn.Parameter], watch: Watch) -> float:
    if trainer.accelerator.mixed_precision != "no" or watch.is_autocast:
        return _TOLERANCE_LOW
    tolerance = max(_TOLERANCE.get(p.dtype, _TOLERANCE_LOW) for p in parameters)
    return max(tolerance, _TOLERANCE_TF32) if torch.get_float32_matmul_precision() != "highest" else tolerance
