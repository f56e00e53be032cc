"""Certificate: before anything is divided, measure on a few short examples of it that gradients add up."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import Trainer

from trainer_plugins.survival.attempt import DidNotFit, attempt
from trainer_plugins.survival.layouts import IndivisibleError, Inputs, Layout
from trainer_plugins.survival.losses import Family, bare_model
from trainer_plugins.survival.marks import frozen
from trainer_plugins.survival.weights import Weight, relative_error

# What rounding makes of a right weight, and less than what a wrong one does: 5 % was the least of those tried. A loss
# is often taken in float32, whatever the model is in; and in float32 there may be TF32.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 5e-3}
_TOLERANCE_LOW = 3e-2

_PROBED_NUMBERS = 1 << 20
_EXAMPLES = (4, 3, 2)

Loss = Callable[[Inputs], torch.Tensor]


def certify(trainer: Trainer, model: nn.Module, family: Family, layout: Layout, inputs: Inputs, loss: Loss) -> Weight:
    """The weight by which the gradients of two parts of a probe add up to that of the probe.

    Gradients and not losses: a coupled loss can be equal in value and wrong in gradient. Necessary, and no proof: the
    proof is the list in `losses.py`. Takes three small forward and backward passes, once; nothing is left behind but
    random numbers drawn, and metrics counted, which the caller puts back.

    Raises:
        IndivisibleError: no weight of this family fits, or there was no room to measure.
    """
    num = next((num for num in _EXAMPLES if num <= layout.count(inputs)), 0)
    probe = layout.probe(inputs, num)
    parts = [layout.take(probe, 0, 1), layout.take(probe, 1, num)]
    parameters = _probed(model)
    with _without_dropout(model), frozen(set(model.parameters()) - set(parameters)), _uses(model) as uses:
        measured = attempt(lambda: [_gradient(loss, some, parameters) for some in (probe, *parts)])
    if isinstance(measured, DidNotFit):
        raise IndivisibleError(f"there was no room to measure whether its loss can be divided ({measured.first_line})")
    if shared := _shared_under_reentrant_checkpointing(model, uses):
        raise IndivisibleError(
            f"`{shared}` is used more than once under reentrant checkpointing, which finishes its gradient in parts: "
            'pass gradient_checkpointing_kwargs={"use_reentrant": False}'
        )
    whole, *gradients = measured
    errors = {
        weight: relative_error(whole, gradients, _factors(weight, probe, parts, num)) for weight in family.weights
    }
    tolerance = _tolerance(trainer, parameters)
    for weight, error in errors.items():
        if error <= tolerance:
            return weight
    tried = ", ".join(f"{weight.name}: {error:.1e}" for weight, error in errors.items())
    raise IndivisibleError(f"its gradient is not the sum of its parts' (off by, if it is {tried})")


def _gradient(loss: Loss, inputs: Inputs, parameters: list[nn.Parameter]) -> torch.Tensor:
    with torch.enable_grad():
        gradients = torch.autograd.grad(loss(inputs), parameters, allow_unused=True)
    pairs = zip(parameters, gradients, strict=True)
    flat = [torch.zeros(_num_numbers(p)) if g is None else g.flatten().cpu() for p, g in pairs]
    return torch.cat([gradient.double() for gradient in flat])


def _factors(weight: Weight, probe: Inputs, parts: list[dict[str, object]], num: int) -> list[float]:
    whole = weight.of(probe, num)
    return [weight.share(weight.of(part, size), whole) for part, size in zip(parts, (1, num - 1), strict=True)]


def _probed(model: nn.Module) -> list[nn.Parameter]:
    """Small parameters of every depth (norms, biases, adapters): they see every coupling, and cost little."""
    chosen: list[nn.Parameter] = []
    room = _PROBED_NUMBERS
    for parameter in sorted((p for p in model.parameters() if p.requires_grad), key=_num_numbers):
        room -= _num_numbers(parameter)
        if room < 0 and chosen:
            break
        chosen.append(parameter)
    return chosen


def _num_numbers(parameter: nn.Parameter) -> int:
    """Of the whole, where ZeRO-3 keeps a part of it here."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


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
