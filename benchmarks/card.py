"""Choose the card that a benchmark runs on."""

import torch

from trainer_plugins.units import GIB


def card_here() -> str:
    """Return `cuda` if there is a card, else `simgpu`, a simulated one of 1 GiB."""
    if torch.cuda.is_available():
        return "cuda"
    from trainer_plugins.testing import simgpu

    simgpu.enable(1 * GIB)
    return "simgpu"
