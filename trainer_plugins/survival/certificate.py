"""Certificate: before anything is divided, measure on a few short examples of it that gradients add up."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from transformers import Trainer

from trainer_plugins.survival.attempt import DidNotFit
from trainer_plugins.survival.layouts import IndivisibleError, Inputs, Layout
from trainer_plugins.survival.losses import Family, bare_model
from trainer_plugins.survival.marks import frozen
from trainer_plugins.survival.ranks import Alone
from trainer_plugins.survival.weights import Weight, relative_error

# What rounding makes of a right weight, and less than what a wrong one does: 5 % was the least of those tried. A loss
# is often taken in float32, whatever the model is in; and in float32 there may be TF32.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 5e-3}
_TOLERANCE_LOW = 3e-2

_PROBED_NUMBERS = 1 << 20
_EXAMPLES = (4, 3, 2)

Loss = Callable[[Inputs], torch.Tensor]


def certify(ranks: Alone, model: nn.Module, family: Family, layout: Layout, inputs: Inputs, loss: Loss) -> Weight:
    """The weight by which the gradients of two parts of a probe add up to that of the probe.

    Gradients and not losses: a coupled loss can be equal in value and wrong in gradient. Necessary, and no proof: the
    proof is the list in `losses.py`. Takes three small forward and backward passes, once; nothing is left behind but
    random numbers drawn, and metrics counted, which the caller puts back. Ranks that compute together measure together,
    and one without two examples lends itself to the others.

    Raises:
        IndivisibleError: no weight of this family fits, or there was no room to measure.
    """
    num = next((num for num in _EXAMPLES if num <= layout.count(inputs)), 1)
    probe = layout.probe(inputs, num)
    parts = [layout.take(probe, 0, 1), layout.take(probe, 1, num)] if num > 1 else [probe, probe]
    parameters = _probed(model)
    measured: list[torch.Tensor] = []
    with _without_dropout(model), frozen(set(model.parameters()) - set(parameters)), _uses(model) as uses:
        for some in (probe, *parts):
            gradient = ranks.attempt(partial(ranks.gradient, partial(loss, some), parameters))
            if isinstance(gradient, DidNotFit):
                words = gradient.first_line
                raise IndivisibleError(f"there was no room to measure whether its loss can be divided ({words})")
            measured.append(gradient)
    if shared := _shared_under_reentrant_checkpointing(model, uses):
        raise IndivisibleError(
            f"`{shared}` is used more than once under reentrant checkpointing, which finishes its gradient in parts: "
            'pass gradient_checkpointing_kwargs={"use_reentrant": False}'
        )
    whole, *gradients = measured
    errors = {
        weight: relative_error(whole, gradients, _factors(weight, probe, parts, num)) if num > 1 else 0.0
        for weight in family.weights
    }
    errors = {weight: _largest(ranks, error) for weight, error in errors.items()}
    tolerance = _tolerance(ranks.trainer, parameters)
    for weight, error in errors.items():
        if error <= tolerance:
            return weight
    tried = ", ".join(f"{weight.name}: {error:.1e}" for weight, error in errors.items())
    raise IndivisibleError(f"its gradient is not the sum of its parts' (off by, if it is {tried})")


def _largest(ranks: Alone, error: float) -> float:
    """Over the ranks, in steps of 1e-9; what is above 1, or no number, is 1."""
    return ranks.most(round(1e9 * error) if error < 1 else 10**9) / 1e9


def _factors(weight: Weight, probe: Inputs, parts: list[dict[str, object]], num: int) -> list[float]:
    whole = weight.of(probe, num)
    return [weight.share(weight.of(part, size), whole) for part, size in zip(parts, (1, num - 1), strict=True)]


def _probed(model: nn.Module) -> list[nn.Parameter]:
    """Small parameters of every depth (norms, biases, adapters): they see every coupling, and cost little."""
    chosen: list[nn.Parameter] = []
    room = _PROBED_NUMBERS
    for parameter in sorted((p for p in model.parameters() if p.requires_grad), key=nn.Parameter.numel):
        room -= parameter.numel()
        if room < 0 and chosen:
            break
        chosen.append(parameter)
    return chosen


def _tolerance(trainer: Trainer, parameters: list[nn.Parameter]) -> float:
    if trainer.accelerator.mixed_precision != "no":
        return _TOLERANCE_LOW
    return max(_TOLERANCE.get(p.dtype, _TOLERANCE_LOW) for p in parameters)


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Children in eval mode, so that all passes compute the same; the model itself stays in training: TRL asks it."""
    modes = [(module, module.training) for module in model.modules()]
    for module, training in modes:
        module.training = training and module is model
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _uses(model: nn.Module) -> Iterator[dict[nn.Parameter, int]]:
    """Count in how many calls of a module each parameter is used, over all passes inside."""
    uses: dict[nn.Parameter, int] = {}

    def count(module: nn.Module, _: object) -> None:
        for parameter in module.parameters(recurse=False):
            uses[parameter] = uses.get(parameter, 0) + 1

    hooks = [module.register_forward_pre_hook(count) for module in model.modules()]
    try:
        yield uses
    finally:
        for hook in hooks:
            hook.remove()


def _shared_under_reentrant_checkpointing(model: nn.Module, uses: dict[nn.Parameter, int]) -> str | None:
    functions = [getattr(m, "_gradient_checkpointing_func", None) for m in model.modules()
                 if getattr(m, "gradient_checkpointing", False)]  # fmt: skip
    if not any(getattr(function, "keywords", {}).get("use_reentrant", True) for function in functions):
        return None
    base = bare_model(model)
    ends = [get() for name in ("get_input_embeddings", "get_output_embeddings") if (get := getattr(base, name, None))]
    outside = {p for end in ends if end is not None for p in end.parameters()}  # tied, and no checkpoint around them
    often = [n for n, p in model.named_parameters() if p.requires_grad and p not in outside and uses.get(p, 0) > 3]
    return often[0] if often else None
