"""TRL's fused head of a language model on a card, where kernels in Triton do what torch's own operations do elsewhere.

trl/kernels/chunked_logprob.py: the kernels read a tile of the logits and write statistics, or the
gradient in place of the tile. They take nothing from the allocator. What surrounds them is torch's,
and runs here as it is.
"""

import sys
from typing import Any


def kernels_take_nothing() -> None:
    """Put functions that do nothing in place of the kernels, in this process and for good."""
    kernels: Any = sys.modules.get("trl.kernels.chunked_logprob")
    caller: Any = sys.modules.get("trl.trainer.utils")
    if kernels is None or not hasattr(caller, "add_fused_lm_head"):
        return
    kernels._use_triton = lambda device: False  # so that it calls the two functions below
    kernels._forward_tile = kernels._backward_tile = lambda *args, **kwargs: None
    caller._use_triton = lambda device: (
        True
    )  # where there is Triton, only tokens that count are scored
