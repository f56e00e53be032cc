"""Sharded: ranks that hold a part of each weight, and meet in collectives: FSDP1 and FSDP2.

* A micro-batch makes the same collectives in the same order, whatever its rows, and starts from the
  same state of FSDP on every rank (`Sharded.begin`). If a rank fails after the first m of them, its
  peers wait for the rest.
* It completes the rest with a tiny pass, in which the first m are not sent (`Ledger`). No peer has
  to know before its own pass has ended; until then some numbers on all ranks are meaningless.
* One vote follows each backward pass, on the CPU, and none precedes a collective. If a rank failed,
  all discard the gradients of the step (`Sharded.clear`), and compute its micro-batches again in
  equally many pieces (`training/planned_pieces.py`).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.survival.attempt.attempt import DID_NOT_FIT_ELSEWHERE, DidNotFit
from trainer_plugins.survival.attempt.state import RestorePoint
from trainer_plugins.survival.exact.shares import IndivisibleError
from trainer_plugins.survival.limit.limit import most
from trainer_plugins.survival.micro_batch import MicroBatch
from trainer_plugins.survival.ranks.alone import Compute, Gradient, HowToRecover, Loss, Together
from trainer_plugins.wrapped import local_tensor

T = TypeVar("T")

_TRIES = 3  # a tiny pass needs almost no memory: after this many failures it will never fit


class Ledger:
    """Lists the collectives in which this rank has taken part since a micro-batch began.

    After a failure it tells which of them not to send again.
    """

    def __init__(self) -> None:
        self._sent: list[object] = []
        self._next = 0
        self.fail_at: int | None = None  # for a test: collectives before one fails
        self.reduced: list[torch.Tensor] | None = None  # this rank's contributions, if collected

    def clear(self) -> None:
        self._sent.clear()
        self._next = 0

    def rewind(self) -> None:
        self._next = 0

    def is_sent(self, collective: object) -> bool:
        """Return whether the failed pass sent the next collective already; if not, list it."""
        is_sent = self._next < len(self._sent)
        if is_sent and self._sent[self._next] is not collective:
            raise RuntimeError(
                "survive_oom cannot finish the collectives of this rank: a short micro-batch has "
                "them in another order. Training stops here; detach survive_oom for this model"
            )
        if not is_sent:
            if len(self._sent) == self.fail_at:
                raise torch.OutOfMemoryError("CUDA out of memory, to try what it leaves")
            self._sent.append(collective)
        self._next += 1
        return is_sent


class Sharded(Together):
    """Handles ranks that hold a part of each weight, with either version of FSDP."""

    passes_twice = False
    keeps_gradients = False
    fatal = Exception  # other ranks would wait
    recovery = HowToRecover.AGAIN
    wrapper: type  # class of the models that this version of FSDP shards

    def __init__(self, trainer: HfTrainer, model: nn.Module) -> None:
        super().__init__(trainer, model)
        self._step, self._is_tried = -1, False
        self._is_spoilt = False  # a rank has failed in this pass
        self._ledger = Ledger()
        self._parameters: tuple[nn.Parameter, ...] = tuple(model.parameters())
        # TRL's second model also gathers inside `compute_loss`.
        models = (model, getattr(trainer, "ref_model", None))
        self._roots: list[Any] = [one for one in models if isinstance(one, self.wrapper)]

    def _listing(self) -> AbstractContextManager[object]:
        """Surround a pass, listing its collectives in the ledger."""
        raise NotImplementedError

    def _num_gathers(self) -> int:
        raise NotImplementedError

    def _forget_pass(self) -> None:
        """Reset FSDP to the beginning of a pass."""
        raise NotImplementedError

    def _reshard(self) -> None:
        raise NotImplementedError

    def _reduce_each(self, is_on: bool) -> None:
        """Reduce the gradients of each further pass in this micro-batch, or of none."""
        raise NotImplementedError

    def _drop(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def may_exchange(self) -> bool:
        # A rank that failed does not know the shape of the others' exchange, so they vote.
        self._is_spoilt = self._is_spoilt or self.on_any(self.is_finishing)
        return not self._is_spoilt

    def begin(self, micro: MicroBatch) -> None:
        if self._step != self.trainer.state.global_step:
            self._step = self.trainer.state.global_step
            self.micros.clear()
            self._reset()
        self.micros.append(micro)
        self._settle()

    def attempt(self, work: Callable[[], T], *, is_end: bool = True) -> T | DidNotFit:
        trained = [p.requires_grad for p in self._parameters]
        with self._listing():
            outcome = super().attempt(work)
        has_failed = isinstance(outcome, DidNotFit)
        if isinstance(outcome, DidNotFit):
            self._finish_collectives(outcome, trained)
        elif not is_end:
            return outcome  # the vote follows its backward pass
        failed_anywhere = self.on_any(has_failed)
        self._settle()
        if not failed_anywhere:
            return outcome
        self._drop()  # anything reduced meanwhile is invalid
        return outcome if has_failed else DID_NOT_FIT_ELSEWHERE

    def most(self, compute: Compute, num: int, least: int, parts: Sequence[float] = ()) -> int:
        def fits(size: int) -> bool:
            return not isinstance(self.attempt(partial(compute, self.model, size)), DidNotFit)

        num = self.lowest(num)
        self._reset()
        with self.apart():
            self._compute(self.tiny)
            num_fit = most(fits, num, least, (num,))
        self.clear()
        return num_fit

    def gradient(self, loss: Loss, parameters: list[nn.Parameter]) -> Gradient:
        """Compute this rank's contribution to each reduction, leaving no gradients."""
        reduced: list[torch.Tensor] = []
        self._ledger.reduced = reduced
        try:
            outcome = self.attempt(lambda: torch.autograd.backward(loss()))
        finally:
            self._ledger.reduced = None
        self._drop()
        return outcome if isinstance(outcome, DidNotFit) else reduced

    def clear(self) -> None:
        """Discard every gradient of this optimizer step. The first call tests that this works."""
        # FSDP keeps unreduced gradients, even through `reset_iter_state` (torch 2.13), so a tiny
        # pass reduces them too. Each later pass of the micro-batch reduces its own.
        with self.apart():
            self._flush()
            if self._is_tried:
                return
            self._is_tried = True
            if self.on_any(not self._leaves_nothing()):
                raise RuntimeError(
                    "survive_oom could not help: a trial just now showed that FSDP of torch "
                    f"{torch.__version__} keeps something of a pass that failed. Please report it"
                )

    def _flush(self) -> None:
        self._reduce_each(True)
        self._compute(self.tiny)
        self._drop()

    def _compute(self, work: Callable[[], T]) -> T:
        for _ in range(_TRIES):
            if not isinstance(outcome := self.attempt(work), DidNotFit):
                return outcome
        raise torch.OutOfMemoryError(
            "survive_oom could not help: not one short example fits on one of the ranks"
        )

    def _leaves_nothing(self) -> bool:
        """Return whether later gradients are the same after a pass that failed on the last rank."""
        before = RestorePoint(self.trainer)
        first = self._compute(self._norms)
        self._drop()
        self._reduce_each(False)
        self.attempt(self._fail_half_way)
        self._flush()
        before.restore()
        second = self._compute(self._norms)
        self._drop()
        before.restore()
        return torch.allclose(
            first, second, rtol=1e-2, atol=1e-3 * float(first.max()), equal_nan=True
        )

    def _norms(self) -> torch.Tensor:
        self.tiny()
        local = [local_tensor(p.grad) for p in self.model.parameters() if p.grad is not None]
        return torch.stack([gradient.float().norm().cpu() for gradient in local])

    def _fail_half_way(self) -> None:
        is_here = dist.get_rank() == dist.get_world_size() - 1
        # If weights stay gathered after the forward pass, no collective follows them.
        self._ledger.fail_at = self._num_gathers() + 1 if is_here else None
        try:
            self.tiny()
        finally:
            self._ledger.fail_at = None
        if is_here:
            raise torch.OutOfMemoryError("CUDA out of memory, to try what it leaves")

    def _finish_collectives(self, failure: DidNotFit, trained: list[bool]) -> None:
        """Complete the collectives in which peers still wait; raise if there is no room."""
        why, self.is_finishing = "not one short example fits", True
        for _ in range(_TRIES):
            self._drop()
            self._forget_pass()
            # If a layer was gathered when the pass failed, PEFT, which disables an adapter for
            # TRL's reference, froze its parts and enables its wholes.
            for parameter, is_trained in zip(self._parameters, trained, strict=True):
                parameter.requires_grad_(is_trained)
            self._ledger.rewind()
            try:
                with self._listing():
                    outcome = super().attempt(self.tiny)
                if not isinstance(outcome, DidNotFit):
                    return
            except IndivisibleError as error:
                why = str(error)
                break
        raise failure.make_error(why)

    def _reset(self) -> None:
        """Undo the effects of an evaluation: gathered weights, and its order of prefetching."""
        self._forget_pass()
        self._settle()

    def _settle(self) -> None:
        """Make the next pass start equally on every rank: nothing sent, no weight gathered."""
        self._ledger.clear()
        self.is_finishing = self._is_spoilt = False
        self._reshard()

    def _explain_no_answer(self) -> str:
        return (
            "survive_oom: the ranks could not agree whether everything fitted, so training stops "
            "here. The rank that ended first logs why"
        )
