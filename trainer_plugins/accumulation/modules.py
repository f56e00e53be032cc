"""Find known modules that couple rows or passes; `attempt/state.py` finds unknown ones."""

import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

# Batch norms that do not subclass torch's. EvoNorm B uses the variance of the micro-batch.
_NAMED_SO = re.compile(
    r"(?i)batch_?(re)?norm|inplace_?abn|evonorm(2d)?b|ghost_?norm|switch(able)?_?norm"
)

_CAPACITIES = ("expert_capacity", "capacity_factor")
_CAPACITY_OF_A_ROW = ("SwitchTransformersTop1Router",)  # counts tokens per row


COUPLED_MODELS = {
    "PaliGemmaForConditionalGeneration": "a row without padding is computed differently when no "
    "other row is padded",
}


def find_coupled_modules(model: nn.Module) -> Iterator[str]:
    """Yield one sentence per kind of module that prevents splitting a micro-batch of this model."""
    training = _training_modules(model)
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        for kind, why in _reasons(module, module in training):
            found.setdefault(kind, why.format(name=name, kind=type(module).__name__))
    yield from found.values()


def rope_boundary(model: nn.Module) -> int | None:
    """Return the sequence length above which longrope changes the frequencies of all rows."""
    lengths = [
        _original_length(m)
        for m in model.modules()
        if any("longrope" in kind for kind in _rope_types(m))
    ]
    return min(lengths, default=None)


def _reasons(module: nn.Module, is_training: bool) -> Iterator[tuple[str, str]]:
    has_running = getattr(module, "running_mean", None) is not None
    is_batch_norm = isinstance(module, _BatchNorm) or bool(_NAMED_SO.search(type(module).__name__))
    is_frozen = not is_training and (has_running or not isinstance(module, _BatchNorm))
    if is_batch_norm and not is_frozen and "Frozen" not in type(module).__name__:
        yield (
            "norm",
            "batch normalization (`{name}`, {kind}) makes every row depend on the others of its "
            "micro-batch",
        )
    if isinstance(module, _InstanceNorm) and has_running and is_training:
        yield "running", "each forward pass moves the running statistics of `{name}` ({kind})"
    hooks = module._forward_pre_hooks.values()
    is_spectral = isinstance(module, _SpectralNorm) or any(
        isinstance(hook, SpectralNorm) for hook in hooks
    )
    if is_training and is_spectral:
        yield "spectral", "each forward pass iterates spectral_norm (`{name}`, {kind})"
    has_capacity = any(getattr(module, name, None) for name in _CAPACITIES)
    if has_capacity and type(module).__name__ not in _CAPACITY_OF_A_ROW:
        yield (
            "capacity",
            "the router `{name}` ({kind}) has a capacity, which counts the tokens of the whole "
            "micro-batch",
        )
    if any("dynamic" in kind for kind in _rope_types(module)):
        yield (
            "rope",
            "dynamic RoPE (`{name}`, {kind}) remembers the longest sequence, even of a failed try",
        )


def _rope_types(module: nn.Module) -> list[str]:
    """List the types of a rotary embedding; there are several if kinds of layers differ."""
    kinds = getattr(module, "rope_type", None) or ()
    if isinstance(kinds, str):
        return [kinds]
    return [str(kind) for kind in getattr(kinds, "values", tuple)()]


def _original_length(module: nn.Module) -> int:
    name = "original_max_position_embeddings"
    config: Any = module.config
    ropes = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    places = [ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))]
    lengths = [rope[name] for rope in places if name in rope]
    own = getattr(config, name, None) or config.max_position_embeddings
    return int(min(lengths, default=own))


def _training_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules in training mode after `model.train()`, which may keep norms frozen."""
    before = [(module, module.training) for module in model.modules()]
    model.train()
    training = {module for module in model.modules() if module.training}
    for module, mode in before:
        module.training = mode
    return training
