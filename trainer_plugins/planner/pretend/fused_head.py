"""Let TRL's Triton kernels for logits and their losses be counted where no kernel can run.

On a card they do what torch's own operations do elsewhere, and take nothing from the allocator. The
code around them is torch's.
"""

import sys
from typing import Any

import torch


class _LogProbabilities(torch.autograd.Function):
    """Allocates what TRL's kernels for log-probabilities and entropy write to.

    trl/kernels/logprob_entropy.py: four numbers a token, of which two are kept with the logits, and
    one gradient of all logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        index: torch.Tensor,
        row_mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        shape = logits.shape[:-1]
        made = [torch.empty(shape, dtype=torch.float32, device=logits.device) for _ in range(4)]
        ctx.save_for_backward(logits, index, *made[2:], row_mask)
        return made[0], made[1]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        logits: torch.Tensor = ctx.saved_tensors[0]
        gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
        _read = [each.contiguous() for each in gradients if each is not None]
        return gradient, None, None


def kernels_take_nothing() -> None:
    """Replace the kernels by what they allocate, in this process and for good."""
    kernels: Any = sys.modules.get("trl.kernels.chunked_logprob")
    caller: Any = sys.modules.get("trl.trainer.utils")
    if hasattr(caller, "_supports_trl_loss_kernel"):
        caller.is_triton_available = lambda: True
        caller._fused_logprob_entropy = _log_probabilities
    if kernels is None or not hasattr(caller, "add_fused_lm_head"):
        return
    # they read a tile of the logits, and write statistics, or the gradient in place of the tile
    kernels._use_triton = lambda device: False  # it then calls the two functions below
    kernels._forward_tile = kernels._backward_tile = lambda *args, **kwargs: None
    # with Triton, only the tokens that count are scored
    caller._use_triton = lambda device: True


def _log_probabilities(
    logits: torch.Tensor,
    index: torch.Tensor,
    temperature: float = 1.0,
    row_mask: torch.Tensor | None = None,
) -> Any:
    return _LogProbabilities.apply(logits, index, row_mask)  # type: ignore[no-untyped-call]
