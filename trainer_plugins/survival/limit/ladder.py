"""The ladder: what to switch on when the smallest piece does not fit, and computes the same."""

from torch import nn

from trainer_plugins.survival.exact.losses import bare_model
from trainer_plugins.survival.limit.offload import Offload

RUNGS = ("checkpointing", "offload")
_OFFLOAD = "_activations_on_the_host"


def is_checkpointing(model: nn.Module) -> bool:
    """Tell whether the model computes activations again in its backward."""
    base = bare_model(model)
    # The second name is that of transformers before 5.
    name = next(
        (
            n
            for n in ("is_activation_checkpointing", "is_gradient_checkpointing")
            if hasattr(type(base), n)
        ),
        "",
    )
    return bool(name and getattr(base, name))


def climb(rung: str, model: nn.Module) -> bool:
    """Switch a rung on.

    Returns:
        Whether that was done: not if the model has it on already, or lacks it.
    """
    base = bare_model(model)
    if rung == "offload":
        if hasattr(base, _OFFLOAD) or not Offload.is_possible(base):
            return False
        setattr(base, _OFFLOAD, Offload(base))
        return True
    if is_checkpointing(model) or not getattr(base, "supports_gradient_checkpointing", False):
        return False
    how = {"use_reentrant": False}
    if hasattr(base, "activation_checkpointing_enable"):  # transformers 5
        base.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
    else:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    return True


def descend(rung: str, model: nn.Module) -> None:
    """Switch a rung off again."""
    base = bare_model(model)
    if rung == "offload":
        vars(base).pop(_OFFLOAD).remove()
        return
    getattr(base, "activation_checkpointing_disable", base.gradient_checkpointing_disable)()
