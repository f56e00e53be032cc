"""Modules: find those in which rows of a micro-batch, or passes, depend on each other.

Known ones are found by their class before training. Unknown ones are found by their buffers, which
the first forward pass of a run must leave as they are.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from trainer_plugins.survival.attempt.snapshot import Placed, placed_buffers

_NAMED_SO = re.compile(
    r"(?i)batch_?(re)?norm|inplace_?abn|evonorm(2d)?b|ghost_?norm|switch(able)?_?norm"
)
"""Names of batch normalizations that are no subclass of torch's.

EvoNorm's variant B takes the variance of the micro-batch.
"""

_CAPACITIES = ("expert_capacity", "capacity_factor")
_CAPACITY_OF_A_ROW = ("SwitchTransformersTop1Router",)
"""Routers that count the tokens of each row by themselves."""

_LARGEST = 1 << 22
"""Most numbers of a buffer that is watched: statistics are small."""


def coupled_modules(model: nn.Module) -> Iterator[str]:
    """Say why micro-batches of a model cannot be divided: a sentence for each kind of module."""
    training = _training_modules(model)
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        for kind, why in _reasons(module, module in training):
            found.setdefault(kind, why.format(name=name, kind=type(module).__name__))
    yield from found.values()


def rope_boundary(model: nn.Module) -> int | None:
    """Return the length beyond which one sequence changes the rotary embedding of all others.

    Rotary embeddings of the type "longrope" take other frequencies as soon as one position of the
    micro-batch is beyond what the model was first trained with. It is None for other models.
    """
    lengths = [
        _original_length(m)
        for m in model.modules()
        if any("longrope" in kind for kind in _rope_types(m))
    ]
    return min(lengths, default=None)


class WatchedBuffers:
    """Keeps the buffers of a model at a moment, to find out which one was moved since.

    The frequencies of rotary embeddings are left out: they are judged by name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = {
            (one.path, one.name): one.buffer.detach().to("cpu", copy=True)
            for one in self._watched()
        }

    def what_moved(self) -> str:
        """Say which of them has moved, as a reason to divide nothing; empty if none has."""
        for owner, path, name, buffer in self._watched():
            before = self._before.get((path, name))
            if before is not None and not _is_same(before, buffer.detach().cpu()):
                return (
                    f"`{path}{'.' if path else ''}{name}`, a buffer of {type(owner).__name__}, is "
                    "moved by each forward pass in training: pieces need several passes, and each "
                    f"would see `{name}` as the one before left it"
                )
        return ""

    def _watched(self) -> Iterator[Placed]:
        for one in placed_buffers(self._model, _LARGEST):
            # A number that counts passes is moved by more of them, but changes no row.
            if one.buffer.is_floating_point() and not one.name.endswith("inv_freq"):
                yield one


def _reasons(module: nn.Module, is_training: bool) -> Iterator[tuple[str, str]]:
    """Give each kind of trouble that a module makes, and a sentence about it."""
    has_running = getattr(module, "running_mean", None) is not None
    is_batch_norm = isinstance(module, _BatchNorm) or bool(_NAMED_SO.search(type(module).__name__))
    is_frozen = not is_training and (has_running or not isinstance(module, _BatchNorm))
    if is_batch_norm and not is_frozen and "Frozen" not in type(module).__name__:
        yield (
            "norm",
            "batch normalization (`{name}`) makes every row depend on the others of its "
            "micro-batch ({kind})",
        )
    if isinstance(module, _InstanceNorm) and has_running and is_training:
        yield (
            "running",
            "the running statistics of `{name}` ({kind}) are moved by each forward pass, even that "
            "of a piece",
        )
    hooks = module._forward_pre_hooks.values()
    if is_training and (
        isinstance(module, _SpectralNorm) or any(isinstance(hook, SpectralNorm) for hook in hooks)
    ):
        yield (
            "spectral",
            "spectral_norm (`{name}`, {kind}) takes a step of its power iteration in each forward "
            "pass",
        )
    if (
        any(getattr(module, c, None) for c in _CAPACITIES)
        and type(module).__name__ not in _CAPACITY_OF_A_ROW
    ):
        yield (
            "capacity",
            "the router `{name}` ({kind}) has a capacity, which counts the tokens of the whole "
            "micro-batch",
        )
    if any("dynamic" in kind for kind in _rope_types(module)):
        yield (
            "rope",
            "dynamic RoPE (`{name}`, {kind}) keeps the longest length that it has met, even that "
            "of a piece or a trial",
        )


def _rope_types(module: nn.Module) -> list[str]:
    """List the types of a rotary embedding: several if kinds of layers differ."""
    kinds = getattr(module, "rope_type", None) or ()
    if isinstance(kinds, str):
        return [kinds]
    return [str(kind) for kind in getattr(kinds, "values", tuple)()]


def _original_length(module: nn.Module) -> int:
    config: Any = module.config
    ropes = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    places = [ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))]
    lengths = [
        rope["original_max_position_embeddings"]
        for rope in places
        if "original_max_position_embeddings" in rope
    ]
    own = (
        getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
    )
    return int(min(lengths, default=own))


def _training_modules(model: nn.Module) -> set[nn.Module]:
    """Find the modules that train after `model.train()`, which may keep some norms frozen."""
    before = [(module, module.training) for module in model.modules()]
    model.train()
    training = {module for module in model.modules() if module.training}
    for module, mode in before:
        module.training = mode
    return training


def _is_same(before: torch.Tensor, now: torch.Tensor) -> bool:
    if before.shape != now.shape:
        return False
    return bool(torch.allclose(before, now, rtol=0.0, atol=0.0, equal_nan=True))
