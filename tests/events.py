"""A callback of a user's that does one thing."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from transformers import TrainerCallback

from trainer_plugins.units import MIB


def at(event: str, act: Callable[[Any], object], *steps: int) -> TrainerCallback:
    """Return a callback that acts at an event, with what the Trainer gives; or only after some steps."""

    class At(TrainerCallback):
        pass

    def happens(self, args, state, control, **given):
        if not steps or state.global_step in steps:
            act(SimpleNamespace(args=args, state=state, **given))

    setattr(At, f"on_{event}", happens)
    return At()


def takes(*mibs: int) -> Callable[[Any], None]:
    """Return what takes some MiB of the run's device, one size after the other, and frees them."""

    def take(now: Any) -> None:
        for mib in mibs:
            torch.zeros(mib * MIB, dtype=torch.uint8, device=now.args.device)

    return take
