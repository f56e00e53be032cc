"""DDP: the rank that failed finishes what it owes the others, and they wait.

No vote, and no rank has to divide alike.

DDP needs of each rank that it exchanges its buffers once and reduces each bucket once, in order. It
does not need promptness. So what the failed attempt has done of that is not repeated, and what it
has not, a piece does:

* It failed inside the forward pass: the last piece goes through DDP, without the exchange of
  buffers, which was. The others are computed on the bare model, where nothing reaches another rank.
* It failed later, when the reducer was armed: every gradient that becomes ready is taken for that
  of the whole and sent. Those that were ready are, and are frozen (`Piece.final`). The pieces are
  computed on shadows of the parameters, which share weights and gradients but not the reducer's
  hooks; then the missing hooks are called, by adding 0.

Unsynchronised micro-batches of a window are computed in pieces like in one process, but for the
exchange of buffers.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import cache
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

from trainer_plugins.survival.attempt.attempt import DidNotFit
from trainer_plugins.survival.attempt.marks import GradientMark, frozen
from trainer_plugins.survival.micro_batch import MicroBatch
from trainer_plugins.survival.ranks.alone import Alone

T = TypeVar("T")


class _Progress(IntEnum):
    """How far an attempt came in `DistributedDataParallel.forward`."""

    OUTSIDE = 0
    PREPARING = 1
    """DDP exchanges buffers, and once in a run builds its buckets."""
    INSIDE = 2
    """The model computes."""
    ARMED = 3
    """It has computed; the reducer waits for gradients, where this micro-batch is synchronised."""


class DDP(Alone):
    """Of one run."""

    model: DistributedDataParallel

    def __init__(self, trainer: Trainer, model: DistributedDataParallel) -> None:
        super().__init__(trainer, model)
        self._progress = _Progress.OUTSIDE
        self._is_synced = self._is_armed = False
        self._sent: set[nn.Parameter] = set()
        """The parameters whose hooks the reducer has seen."""
        self._used: set[nn.Parameter] = set()
        """Those that pieces gave a gradient."""

    @property
    def bare(self) -> nn.Module:
        """The model without its wrapper: computing on it reaches no other rank."""
        module: nn.Module = self.model.module
        return module

    def begin(self, micro: MicroBatch) -> None:
        """A micro-batch begins."""
        self._progress = _Progress.OUTSIDE
        self._is_synced, self._is_armed = self.model.require_backward_grad_sync, False
        self._sent, self._used = set(), set()

    def attempt(
        self,
        work: Callable[[], T],
        release: Callable[[], object] | None = None,
        *,
        is_end: bool = True,
    ) -> T | DidNotFit:
        """Run what may not fit, and see how far it comes in DDP."""
        hooks = (
            self.model.register_forward_pre_hook(lambda *_: self._advance(_Progress.PREPARING)),
            self.bare.register_forward_pre_hook(lambda *_: self._advance(_Progress.INSIDE)),
            self.bare.register_forward_hook(lambda *_: self._advance(_Progress.ARMED)),
        )
        try:
            return super().attempt(work, release, is_end=is_end)
        finally:
            for hook in hooks:
                hook.remove()

    def failed(self, phase: str, is_last: bool, changed: set[nn.Parameter]) -> str:
        """What was attempted did not fit: see what of it the other ranks have noticed."""
        progress, self._progress = self._progress, _Progress.OUTSIDE
        if self._is_armed:
            return ""
        if progress == _Progress.PREPARING:
            return "it failed where DDP exchanges buffers or builds its buckets, which the other ranks do only once"
        if progress == _Progress.INSIDE:
            self.model.require_forward_param_sync = False  # DDP itself sets it again
        if progress == _Progress.ARMED and self._is_synced:
            self._is_armed, self._sent = True, changed
        return ""

    @contextmanager
    def piece(self, is_last: bool) -> Iterator[nn.Module]:
        """What forward and backward of a piece run in, and on which model."""
        mark = GradientMark(self.bare.parameters())
        shadows = Shadows(self.bare) if self._is_armed else None
        reaches_others = is_last and not self._is_armed
        try:
            yield self.model if reaches_others else self.bare
        finally:
            if shadows is not None:
                shadows.leave()
            self._used |= mark.changed()
        if reaches_others:
            self._sent = mark.changed()

    def finished(self) -> None:
        """Every piece is computed: see to it that the reducer has seen every gradient.

        Raises:
            RuntimeError: it had before the attempt failed, and its own end was lost with that.
        """
        missing = self._used - self._sent
        if self._is_armed and not missing:
            raise RuntimeError(
                "survive_oom could not help: the pass failed when DDP had sent every gradient, and torch has no way to "
                "let it take the sums back. A smaller per_device_train_batch_size does not meet that"
            )
        # A weight that the last piece does not use, as an expert without a token: the ones that DDP
        # found unused, it has sent itself.
        if self._is_armed or (self._is_synced and not self.model.find_unused_parameters):
            send(missing)

    def _advance(self, to: _Progress) -> None:
        """One step at a time: the bare model is called without DDP too, as the reference of DPO with adapters."""
        if to == self._progress + 1:
            self._progress = to


class Shadows:
    """In the place of the trainable parameters of a model: the same weights and gradients, and none of their hooks."""

    def __init__(self, model: nn.Module) -> None:
        self._shadows = {p: self._shadow(p) for p in model.parameters() if p.requires_grad}
        self._places = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if parameter in self._shadows
        ]
        for module, name, parameter in self._places:
            setattr(module, name, self._shadows[parameter])

    def leave(self) -> None:
        """Put the parameters back, with the gradients they have by now."""
        for module, name, parameter in self._places:
            setattr(module, name, parameter)
        for parameter, shadow in self._shadows.items():
            parameter.grad = shadow.grad

    def _shadow(self, parameter: nn.Parameter) -> nn.Parameter:
        shadow = nn.Parameter(parameter.detach())
        shadow.grad = parameter.grad
        return shadow


def send(parameters: Iterable[nn.Parameter]) -> None:
    """Let the reducer's hooks of these be called, in a backward pass that adds 0 to their gradients."""
    to = [p for p in parameters if p.requires_grad]
    torch.autograd.backward(
        to, [torch.zeros((), dtype=p.dtype, device=p.device).expand_as(p) for p in to]
    )


@cache
def finishes_here() -> bool:
    """Try on this torch, once in a process, whether DDP can be finished after a backward pass that failed half way.

    In a group of this rank alone: none of the others takes part. It takes 0.02 s, and the group
    stays: freed while its thread lets go of a tensor, which needs the interpreter, gloo now and
    then waits for it forever.
    """

    def fail(_: object) -> None:
        raise RuntimeError("half way")

    try:
        alone = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        layers = [nn.Linear(1, 1, bias=False) for _ in range(2)]
        bare = nn.Sequential(*layers)
        model = DistributedDataParallel(bare, process_group=alone)
        model.require_forward_param_sync = False
        if model.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            return False
        weights = [*bare.parameters()]
        for weight in weights:
            nn.init.ones_(weight)
            weight.grad = torch.ones_like(weight)
        hidden: list[torch.Tensor] = []
        with layers[0].register_forward_hook(lambda *args: hidden.append(args[-1])):
            loss = model(torch.ones(2, 1)).sum()
        torch.autograd.graph.register_multi_grad_hook(hidden, fail)
        mark = GradientMark(weights)
        noticed: list[torch.Tensor] = []
        weights[0].register_post_accumulate_grad_hook(noticed.append)  # type: ignore[no-untyped-call]
        try:
            loss.backward()
        except RuntimeError:
            sent = mark.changed()
        else:
            return False
        for row in torch.ones(2, 1):
            with frozen(sent):
                shadows = Shadows(bare)
                bare(row).sum().backward()
                shadows.leave()
        if noticed:  # of what the shadows did
            return False
        send(set(weights) - sent)
        model(
            torch.ones(2, 1)
        ).sum().backward()  # which DDP refuses while the one before is not finished
        return sent == {weights[1]} and all(weight.grad == 5 for weight in weights)
    except RuntimeError:
        return False
