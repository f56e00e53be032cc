"""Let TRL's fused head of a language model run without its Triton kernels.

On a card these kernels do what torch's own operations do elsewhere. They read a tile of the logits,
and write statistics, or the gradient in place of the tile (trl/kernels/chunked_logprob.py). They
take nothing from the allocator. The code around them is torch's, and runs here as it is.
"""

import sys
from typing import Any


def kernels_take_nothing() -> None:
    """Replace the kernels by functions that do nothing, in this process and for good."""
    kernels: Any = sys.modules.get("trl.kernels.chunked_logprob")
    caller: Any = sys.modules.get("trl.trainer.utils")
    if kernels is None or not hasattr(caller, "add_fused_lm_head"):
        return
    kernels._use_triton = lambda device: False  # it then calls the two functions below
    kernels._forward_tile = kernels._backward_tile = lambda *args, **kwargs: None
    # with Triton, only the tokens that count are scored
    caller._use_triton = lambda device: True
