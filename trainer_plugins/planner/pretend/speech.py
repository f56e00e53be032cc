"""Count CTC losses where tensors have no values: sizes are of aten's LossCTC.cpp and .cu."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor

from trainer_plugins.planner.plan import NotPredicted
from trainer_plugins.planner.tracing.trace import Tracker

ASSUMPTION = "the labels of a CTC loss are as long as their shape allows: the worst case"
_MEAN, _SUM = 1, 2  # torch/nn/_reduction.py, get_enum
_BATCHED = 3  # dimensions: time, rows, classes
_PICKED_BY_MASK = ("aten::masked_select", "aten::index")

_Lengths: TypeAlias = torch.Tensor | Sequence[int]


class CtcLoss:
    """Computes `torch.ctc_loss` by allocating what torch's kernels allocate."""

    def __init__(self, tracker: Tracker, on_cuda: bool) -> None:
        self._tracker, self._on_cuda = tracker, on_cuda

    def __call__(
        self,
        log_probs: torch.Tensor,
        targets: torch.Tensor,
        input_lengths: _Lengths,
        target_lengths: _Lengths,
        blank: int = 0,
        reduction: int = _MEAN,
        zero_infinity: bool = False,
    ) -> torch.Tensor:
        if self._on_cuda and _may_take_cudnn(targets, blank):
            raise NotPredicted(
                "a CTC loss by cuDNN, which takes labels in one list of int32: make them int64"
            )
        batched = log_probs if log_probs.ndim == _BATCHED else log_probs.unsqueeze(1)
        longest = self._longest(batched, targets, target_lengths)
        on_card = targets.to(log_probs.device, torch.long)
        losses: torch.Tensor = _CtcKernels.apply(  # type: ignore[no-untyped-call]
            batched, on_card, longest, zero_infinity, self._on_cuda
        )
        if zero_infinity:
            losses = torch.where(losses == torch.inf, losses.new_zeros(()), losses)
        if reduction == _MEAN:
            return (losses / torch.ones_like(losses)).mean()
        if reduction == _SUM:
            return losses.sum()
        return losses if log_probs.ndim == _BATCHED else losses.squeeze(0)

    def _longest(self, log_probs: torch.Tensor, targets: torch.Tensor, lengths: _Lengths) -> int:
        """Return the labels of the longest row; if unknown, the most that it can have."""
        known: Any = lengths
        if isinstance(lengths, FakeTensor):
            known = self._tracker.values.told(lengths)
        elif isinstance(lengths, torch.Tensor):
            known = lengths.tolist()
        if known is not None:
            return max(known, default=0) if isinstance(known, Sequence) else int(known)
        if ASSUMPTION not in self._tracker.assumed:
            self._tracker.assumed.append(ASSUMPTION)
        if targets.ndim == 2:
            return targets.shape[1]
        made_by = self._tracker.storage_of(targets)
        if made_by is not None and made_by.operation in _PICKED_BY_MASK:  # it picks whole rows
            return -(-len(targets) // log_probs.shape[1])
        return min(len(targets), log_probs.shape[0])  # one row has all; more have no path


def _may_take_cudnn(targets: torch.Tensor, blank: int) -> bool:
    """Return whether cuDNN may compute the loss: _use_cudnn_ctc_loss, aten's cudnn/LossCTC.cpp."""
    suits = targets.dtype == torch.int32 and targets.ndim == 1 and blank == 0
    return suits and torch.backends.cudnn.enabled


class _CtcKernels(torch.autograd.Function):
    """Allocates what `_ctc_loss` and `_ctc_loss_backward` do."""

    @staticmethod
    def forward(
        ctx: Any,
        log_probs: torch.Tensor,
        targets: torch.Tensor,
        longest: int,
        zero_infinity: bool,
        on_cuda: bool,
    ) -> torch.Tensor:
        time, rows, _ = log_probs.shape
        _lengths = _of_rows(log_probs) if on_cuda else ()
        log_alpha = log_probs.new_empty(rows, time, 2 * longest + 1)
        losses = log_probs.new_empty(rows)
        ctx.save_for_backward(log_probs, targets, losses, log_alpha)
        ctx.zero_infinity, ctx.on_cuda = zero_infinity, on_cuda
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        log_probs, _, losses, log_alpha = ctx.saved_tensors
        _lengths = _of_rows(log_probs) if ctx.on_cuda else ()
        log_beta = torch.empty_like(log_alpha) if ctx.on_cuda else None
        gradient = torch.empty_like(log_probs, memory_format=torch.contiguous_format)
        time, rows, classes = log_probs.shape
        # ctc_loss_backward_gpu_template, is_large
        if log_beta is not None and 2 * time + 24 * rows // 10 + 2 * classes // 10 > 450:
            _blanks(log_alpha, log_beta)
            if ctx.zero_infinity:
                is_infinite = losses.view(1, rows, 1) == torch.inf
                gradient = torch.where(is_infinite, gradient.new_zeros(()), gradient)
        return gradient, None, None, None, None


def _of_rows(log_probs: torch.Tensor) -> list[torch.Tensor]:
    """Make three numbers a row: of its sound, its labels, and where they begin."""
    return [log_probs.new_empty(log_probs.shape[1], dtype=torch.long) for _ in range(3)]


def _blanks(log_alpha: torch.Tensor, log_beta: torch.Tensor) -> None:
    """Allocate and free what sums over every other label, the blanks, need: logsumexp_out_impl."""
    summed = log_alpha[..., ::2] + log_beta[..., ::2]
    most = summed.amax(2, keepdim=True)
    (summed - most).exp_().sum(2, keepdim=True).log_().add_(most)
