"""Spread a model over the cards of one process by its `device_map`.

Each part computes on its own card, and accelerate's hooks move activations between them.
"""

from collections.abc import Mapping
from typing import Any

import torch

from trainer_plugins.planner.plan import RUN_IT, NotPredicted, PlanError
from trainer_plugins.wrapped import base_model

_ELSEWHERE = ("cpu", "disk")


def device_map_of(trainer: Any, num_gpus: int | None) -> dict[str, int]:
    """Return the card of each part of a Trainer's model, by name; empty if all are on one."""
    if not getattr(trainer, "is_model_parallel", False):
        return {}
    placed: Mapping[str, object] = trainer.model.hf_device_map
    away = sorted(name for name, device in placed.items() if str(device) in _ELSEWHERE)
    if away:
        raise NotPredicted(f"a model with parts off the GPUs (device_map: {away[0]}): {RUN_IT}")
    if trainer.args.world_size > 1:
        raise NotPredicted(
            f"a model that each of several ranks spreads over GPUs (hf_device_map): {RUN_IT}"
        )
    others = (value for name, value in vars(trainer).items() if not name.startswith("model"))
    if any(len(set((getattr(each, "hf_device_map", None) or {}).values())) > 1 for each in others):
        raise NotPredicted(f"a second model that is spread over GPUs (hf_device_map): {RUN_IT}")
    found = {name: _index(device) for name, device in placed.items()}
    num_cards = 1 + max(found.values())
    if num_gpus not in (None, 1, num_cards):
        raise PlanError(f"the model is spread over {num_cards} GPUs, and num_gpus is {num_gpus}")
    return found


def spread(model: Any, device_map: Mapping[str, int], kind: str) -> None:
    """Move each part of a model's base to its card, and attach accelerate's hooks."""
    from accelerate import dispatch_model

    base = base_model(model)
    placed = {name: torch.device(kind, card) for name, card in device_map.items()}
    first = torch.device(kind, min(device_map.values()))
    for name, device in sorted(placed.items(), key=lambda each: len(each[0])):
        _move(base, name, device)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu":  # adapters, outside the base
            tensor.data = tensor.data.to(first)
    skipped = getattr(base, "_skip_keys_device_placement", None)
    dispatch_model(base, placed, main_device=first, skip_keys=skipped)


def _move(base: torch.nn.Module, name: str, device: torch.device) -> None:
    """Move a part of a model, or a single tensor, without replacing its parameters."""
    tensor = {**dict(base.named_parameters()), **dict(base.named_buffers())}.get(name)
    if tensor is not None:
        tensor.data = tensor.data.to(device)
    else:
        torch.nn.Module.to(base.get_submodule(name), device)


def _index(device: object) -> int:
    return device if isinstance(device, int) else torch.device(str(device)).index or 0
