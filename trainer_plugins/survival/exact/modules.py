"""Modules: find those in which rows of a micro-batch, or passes, depend on each other.

Known ones are found by their class before training. Unknown ones are found by their state, which a
forward pass moves.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from trainer_plugins.survival.attempt.state import Moved, State
from trainer_plugins.survival.exact.own_loss import LIBRARIES, is_foreign

_NAMED_SO = re.compile(
    r"(?i)batch_?(re)?norm|inplace_?abn|evonorm(2d)?b|ghost_?norm|switch(able)?_?norm"
)
"""Names of batch normalizations that are no subclass of torch's.

EvoNorm's variant B takes the variance of the micro-batch.
"""

_CAPACITIES = ("expert_capacity", "capacity_factor")
_CAPACITY_OF_A_ROW = ("SwitchTransformersTop1Router",)
"""Routers that count the tokens of each row by themselves."""


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


def owners_of_state(model: nn.Module) -> dict[str, object]:
    """Find the modules of a user's own, and the objects that they keep, by their paths.

    What libraries write is known, or judged by name: their modules keep caches, and attributes of
    their own. A hook or a `forward` of a user's makes a module one of theirs.
    """
    owners: dict[str, object] = {}
    for path, module in model.named_modules():
        if not (_is_written_by_user(module) or _is_hooked(module)):
            continue
        owners[path] = module
        for name, value in vars(module).items():
            if hasattr(value, "__dict__") and not callable(value) and _is_written_by_user(value):
                owners[f"{path}.{name}"] = value
    return owners


def full_state(model: nn.Module, *, has_parameters: bool) -> State:
    """Take down all that a pass may move: of libraries' modules the buffers.

    Args:
        model: without a wrapper, if it can be computed without.
        has_parameters: whether parameters of a user's modules stay the same tensors in a pass.
    """
    modules = dict(model.named_modules())
    return State(owners_of_state(model), modules, has_parameters=has_parameters)


def why_not_divided(moved: Iterable[Moved]) -> str:
    """Say why what one pass has moved forbids a division; empty if it does not.

    Whole numbers, flags and attributes are put back for each piece, since a pass counts the same on
    all rows.
    """
    for one in moved:
        if one.is_learned or not one.is_restorable:
            return (
                f"{one.words} is moved by each forward pass in training: pieces need several "
                "passes, and each would see it as the one before left it"
            )
    return ""


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


def _is_written_by_user(value: object) -> bool:
    kinds = type(value).__mro__
    roots = {kind.__module__.partition(".")[0] for kind in kinds}
    return bool(roots - sys.stdlib_module_names - {*LIBRARIES})


def _is_hooked(module: nn.Module) -> bool:
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return any(map(is_foreign, hooks)) or is_foreign(module.forward)
