"""Says by arithmetic that a run cannot fit, where its activations are not predicted."""

import torch

from trainer_plugins.planner.rehearse.model_of_config import model_of
from trainer_plugins.planner.request import ConfigSource, PlanRequest
from trainer_plugins.units import size

_OF_ADAMW = 4  # a weight, its gradient and two states, each of the weight's size
_SHARDED_BYTES = 16  # FSDP and ZeRO in 16 bits: 2 and 2, and 12 of weight and states in float32


def cannot_fit(request: PlanRequest) -> str:
    """Say that weights, gradients and states alone are too large for the cards; else nothing."""
    source, card = request.source, request.card
    if card is None or not isinstance(source, ConfigSource) or source.quantisation:
        return ""
    optimizer = source.typed("optim") or "adamw"
    if not optimizer.startswith("adamw") or "bit" in optimizer:
        return ""
    try:
        with torch.device("meta"):
            model, _ = model_of(source)
    except Exception:  # noqa: BLE001 - the refusal stands, whatever fails here
        return ""
    parameters = [*model.parameters()]
    weights = sum(each.numel() for each in parameters)
    trained = sum(each.numel() for each in parameters if each.requires_grad)
    width = parameters[0].element_size()
    is_divided = (
        request.launch_file is not None or source.typed("fsdp") or source.typed("deepspeed")
    )
    num_cards = max(1, request.num_gpus) if is_divided else 1
    each = _SHARDED_BYTES if is_divided and num_cards > 1 else _OF_ADAMW * width
    needed = (trained * each + (weights - trained) * width) / num_cards
    if needed <= card.capacity_bytes:
        return ""
    of_all = f"each of {num_cards} cards" if num_cards > 1 else card.name
    return (
        f". By arithmetic it cannot fit: {weights / 1e9:.1f} billion weights, {trained / 1e9:.1f}"
        f" billion of them trained at {each} bytes (weight, gradient, AdamW's states), are"
        f" {size(needed)} on {of_all}, which has {size(card.capacity_bytes)}"
    )
