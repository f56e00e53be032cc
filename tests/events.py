"""A callback of a user's that does one thing."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from transformers import TrainerCallback


def at(event: str, act: Callable[[Any], object], *steps: int) -> TrainerCallback:
    """Return a callback that acts at an event, with what the Trainer gives; or only after some steps."""

    class At(TrainerCallback):
        pass

    def happens(self, args, state, control, **given):
        if not steps or state.global_step in steps:
            act(SimpleNamespace(args=args, state=state, **given))

    setattr(At, f"on_{event}", happens)
    return At()
