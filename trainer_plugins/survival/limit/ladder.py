"""The ladder: what to switch on when the smallest piece does not fit, and computes the same."""

import logging

from torch import nn

from trainer_plugins.streaming.attach import begun, main_memory_lacks, model_refusals
from trainer_plugins.streaming.stream import Stream, stream_of
from trainer_plugins.survival.attempt.attempt import DidNotFit, attempt
from trainer_plugins.survival.exact.losses import bare_model
from trainer_plugins.survival.limit.offload import Offload

logger = logging.getLogger(__name__)

RUNGS = ("checkpointing", "offload")
"""What is switched on unless the user says otherwise."""

STREAM = "stream"
"""The rung that has to be asked for by name: with it each micro-batch copies the frozen base."""

RESIDENT_LAYERS = 2
"""How many layers of a streamed base stay on the card."""

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
    if rung == STREAM:
        return _stream(model)
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
    """Switch a rung off again; a base that does not fit on the card stays streamed."""
    base = bare_model(model)
    stream = stream_of(model)
    if rung == STREAM and stream is not None:
        failed = attempt(stream.remove)
        if isinstance(failed, DidNotFit):
            logger.warning("the base stays in main memory: %s", failed.first_line)
        return
    if rung == "offload":
        vars(base).pop(_OFFLOAD).remove()
        return
    getattr(base, "activation_checkpointing_disable", base.gradient_checkpointing_disable)()


def _stream(model: nn.Module) -> bool:
    device = next(model.parameters()).device
    if device.type == "cpu" or list(model_refusals(model, RESIDENT_LAYERS)):
        return False
    if main_memory_lacks(model, device):
        return False
    stream = Stream(model, device, RESIDENT_LAYERS)
    logger.warning("%s", begun(stream, "the smallest piece of a micro-batch did not fit"))
    return True
