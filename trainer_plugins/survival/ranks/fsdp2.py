"""FSDP2: ranks that gather weights and reduce gradients inside forward and backward, and so owe each other collectives.

Invariants:

* A micro-batch takes the same collectives, in the same order, whatever is in its rows, and begins
  from the same state of FSDP on every rank (`FSDP2.begin`). So a rank that fails after the first m
  of them owes its peers just the rest.
* It pays with a pass over next to nothing, in which the first m are not sent (`Ledger`). No peer is
  interrupted, and none has to be told before its own pass has ended; until then some numbers of all
  ranks are worthless.
* One vote follows each backward pass, on the CPU. Where one rank failed, every rank throws away all
  gradients of the optimizer step (`FSDP2.clear`), and all compute its micro-batches again
  (`replay.py`), in equally many pieces.

No vote stands before a collective, so nothing has to be armed: the cost is one vote a micro-batch,
wherever the limit.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer

from trainer_plugins.survival.attempt.attempt import DidNotFit, DidNotFitElsewhere
from trainer_plugins.survival.attempt.snapshot import Snapshot
from trainer_plugins.survival.exact.layouts import IndivisibleError
from trainer_plugins.survival.limit.limit import most
from trainer_plugins.survival.micro_batch import MicroBatch
from trainer_plugins.survival.ranks.alone import Alone
from trainer_plugins.upkeep.agreement import Agreement

T = TypeVar("T")

# A pass over next to nothing needs next to no memory, so what fails this often does not fit at all.
_TRIES = 3


def refusals_of_fsdp(trainer: Trainer) -> Iterator[str]:
    """Why this Trainer's FSDP cannot be helped."""
    if trainer.accelerator.state.fsdp_plugin.fsdp_version != 2:
        yield "FSDP 1 has nothing that puts it back after an error half way: take FSDP 2 (fsdp_version: 2)"
    elif missing := [name for name in _NEEDED if not hasattr(FSDPModule, name)]:
        yield f"FSDP 2 of torch {torch.__version__} has no {missing[0]}, which came with torch 2.13"
    owner = next(c for c in type(trainer).__mro__ if "compute_loss" in vars(c))
    if owner.__module__.partition(".")[0] == "trl":
        yield f"{owner.__name__}.compute_loss gathers metrics over the ranks: not supported under FSDP yet"


_NEEDED = (
    "reset_iter_state",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_requires_gradient_sync",
)


class Ledger:
    """The collectives that this rank has taken part in since a micro-batch began, in order."""

    def __init__(self) -> None:
        self._sent: list[object] = []
        self._next = 0
        self.fail_at: int | None = None
        """So many go out, and the next fails: to try what that leaves."""
        self.reduced: list[torch.Tensor] | None = None
        """Where it is a list: what this rank brought to each reduction."""

    def clear(self) -> None:
        """A micro-batch begins."""
        self._sent.clear()
        self._next = 0

    def rewind(self) -> None:
        """The micro-batch begins once more, for the collectives that are still owed."""
        self._next = 0

    def is_sent(self, collective: object) -> bool:
        """Whether the one that comes now went out already, in the pass that failed.

        If not, it goes out now.
        """
        is_sent = self._next < len(self._sent)
        if is_sent and self._sent[self._next] is not collective:
            raise RuntimeError(
                "survive_oom cannot finish what this rank owes: the collectives of a short micro-batch come in another "
                "order than those of the one that failed, so training stops here. Detach survive_oom for this model"
            )
        if not is_sent:
            if len(self._sent) == self.fail_at:
                raise torch.OutOfMemoryError("CUDA out of memory, to try what it leaves")
            self._sent.append(collective)
        self._next += 1
        return is_sent


class _Counted:
    """An all-gather or reduce-scatter of FSDP, written down.

    What stands for one not sent again is zeros.
    """

    def __init__(self, collective: Any, ledger: Ledger) -> None:
        self.collective, self._ledger = collective, ledger

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensor: torch.Tensor = self.collective.allocate(*args, **kwargs)
        return tensor

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **kwargs: Any
    ) -> Any:
        if self._ledger.is_sent(self):
            output_tensor.zero_()
            return None
        if "op" in kwargs and self._ledger.reduced is not None:
            self._ledger.reduced.append(input_tensor.cpu().double())
        return self.collective(output_tensor=output_tensor, input_tensor=input_tensor, **kwargs)


class FSDP2(Alone):
    """Ranks that hold a part of each weight."""

    model: Any
    in_step = True

    def __init__(self, trainer: Trainer, model: nn.Module) -> None:
        super().__init__(trainer, model)
        self.window: list[MicroBatch] = []
        self._step, self._is_tried = -1, False
        self._votes = Agreement(trainer.args.ddp_timeout)
        self._ledger = Ledger()
        # Several modules may share what they gather: the last norm and the head, as accelerate
        # wraps them.
        units: dict[int, Any] = {
            id(m._get_fsdp_state()): m for m in model.modules() if isinstance(m, FSDPModule)
        }
        self._units = list(units.values())
        for unit, group in self._groups():
            unit.set_custom_all_gather(_Counted(group._all_gather_comm, self._ledger))
            unit.set_custom_reduce_scatter(_Counted(group._reduce_scatter_comm, self._ledger))

    def end(self) -> None:
        for unit, group in self._groups():
            unit.set_custom_all_gather(group._all_gather_comm.collective)
            unit.set_custom_reduce_scatter(group._reduce_scatter_comm.collective)

    def begin(self, micro: MicroBatch) -> None:
        if self._step != self.trainer.state.global_step:
            self._step = self.trainer.state.global_step
            self.window.clear()
            self._start_anew()
        self.window.append(micro)
        self._settle()

    def attempt(
        self,
        work: Callable[[], T],
        release: Callable[[], object] | None = None,
        *,
        is_end: bool = True,
    ) -> T | DidNotFit:
        outcome = super().attempt(work, release)
        if isinstance(outcome, DidNotFit):
            self._pay(outcome)
        elif not is_end:
            return outcome  # the vote comes after its backward pass
        failed_anywhere = self.highest(isinstance(outcome, DidNotFit))
        self._settle()
        if failed_anywhere:
            self._drop()  # what was reduced since is worth nothing
        return (
            DidNotFitElsewhere()
            if failed_anywhere and not isinstance(outcome, DidNotFit)
            else outcome
        )

    def highest(self, value: int) -> int:
        found = self._votes.highest(int(value))
        if found is None:
            raise RuntimeError(
                "survive_oom: the ranks could not agree whether everything fitted, so training stops here. "
                "The rank that ended first says why"
            )
        return found

    def most(self, compute: Callable[[nn.Module, int], object], num: int, least: int) -> int:
        """On top of all gradients of a pass: in full size where the Trainer does not reduce them yet."""
        num = -self.highest(-num)
        self._start_anew()
        self._compute(self.tiny)
        num_fit = most(
            lambda size: (
                not isinstance(self.attempt(partial(compute, self.model, size)), DidNotFit)
            ),
            *(num, least, (num,)),
        )
        self.clear()
        return num_fit

    def gradient(
        self, loss: Callable[[], torch.Tensor], parameters: list[nn.Parameter]
    ) -> list[torch.Tensor] | DidNotFit:
        """What this rank's examples bring to each reduction.

        There must be no gradient yet, and there is none after.
        """
        reduced: list[torch.Tensor] = []
        self._ledger.reduced = reduced
        try:
            outcome = self.attempt(lambda: torch.autograd.backward(loss()))
        finally:
            self._ledger.reduced = None
        self._drop()
        return outcome if isinstance(outcome, DidNotFit) else reduced

    def clear(self) -> None:
        """Throw away every gradient of this optimizer step, reduced or not.

        Tried, the first time, whether it holds.

        What a rank has not reduced yet stays where FSDP keeps it, through `reset_iter_state` too
        (torch 2.13), and would flow into the next reduction. So it is let flow into that of a pass
        over next to nothing, which is dropped. From here to the end of the micro-batch each pass
        reduces its gradients.

        Raises:
            torch.OutOfMemoryError: on every rank, where one cannot do even that.
            RuntimeError: on every rank, where this torch keeps something of a pass that failed.
        """
        self._flush()
        if not self._is_tried:
            self._is_tried = True
            if self.highest(not self._leaves_nothing()):
                raise RuntimeError(
                    f"survive_oom could not help: FSDP 2 of torch {torch.__version__} keeps something of a pass that "
                    "failed, tried just now. Please report it"
                )

    def _flush(self) -> None:
        self.model.set_requires_gradient_sync(True)
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
        """Whether a pass has the gradients that it had before another failed half way, unreduced, on the last rank."""
        before = Snapshot(self.trainer)
        first = self._compute(self._norms)
        self._drop()
        self.model.set_requires_gradient_sync(False)
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
        local = [
            getattr(p.grad, "_local_tensor", p.grad)
            for p in self.model.parameters()
            if p.grad is not None
        ]
        return torch.stack([gradient.float().norm().cpu() for gradient in local])

    def _fail_half_way(self) -> None:
        is_here = dist.get_rank() == dist.get_world_size() - 1
        # Where weights stay gathered after the forward pass, no collective follows them.
        self._ledger.fail_at = len(list(self._groups())) + 1 if is_here else None
        try:
            self.tiny()
        finally:
            self._ledger.fail_at = None
        if is_here:
            raise torch.OutOfMemoryError("CUDA out of memory, to try what it leaves")

    def _pay(self, failure: DidNotFit) -> None:
        """Take part in the collectives that peers still wait in.

        Raises:
            torch.OutOfMemoryError: that did not fit either. Peers learn it from the end of this
                process.
        """
        why = "not one short example fits"
        for _ in range(_TRIES):
            self.model.reset_iter_state()
            self._ledger.rewind()
            try:
                if not isinstance(super().attempt(self.tiny), DidNotFit):
                    return
            except IndivisibleError as error:
                why = str(error)
                break
        raise failure.as_error(why)

    def _start_anew(self) -> None:
        """What an evaluation leaves: weights gathered, and an order of layers that the next backward prefetches by."""
        if self.model._get_fsdp_state()._is_root is not None:  # has run before
            self.model.reset_iter_state()
        self._settle()

    def _settle(self) -> None:
        """What comes next begins alike on every rank: nothing sent, and no weight gathered."""
        self._ledger.clear()
        for unit in self._units:
            unit.reshard()

    def _drop(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def _groups(self) -> Iterator[tuple[Any, Any]]:
        for unit in self._units:
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                yield unit, group
