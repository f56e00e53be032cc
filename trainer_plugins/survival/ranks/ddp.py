"""DDP: the rank that failed completes what the others wait for; there is no vote.

DDP expects each rank to exchange its buffers once and to reduce each bucket once, in order. Ranks
may divide differently. Nothing that the failed attempt did is repeated:

* If it failed before the backward pass, the last piece goes through DDP, without the exchanges of
  buffers that are done already, one per pass. All other pieces are computed on the bare model, and
  reach no other rank.
* If it failed in the backward pass, gradients that were ready are sent, and frozen
  (`Piece.final`). All pieces are computed on the bare model; then we call the missing hooks, by
  adding 0.

Once DDP has computed, the reducer waits for gradients. Computations on the bare model then use
shadows of the parameters, which share weights and gradients but not the reducer's hooks.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from enum import IntEnum
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer_plugins.advice import SMALLER_MICRO_BATCH, Door
from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.survival.attempt.attempt import DidNotFit
from trainer_plugins.survival.exact.finality import GradientMark, frozen
from trainer_plugins.survival.micro_batch import MicroBatch
from trainer_plugins.survival.ranks.alone import Ranks

T = TypeVar("T")


class _Progress(IntEnum):
    OUTSIDE = 0
    PREPARING = 1  # DDP exchanges buffers, and once per run builds its buckets
    INSIDE = 2  # the model computes


class DDP(Ranks):
    """Handles ranks that divide independently, and reduce each gradient once."""

    model: DistributedDataParallel

    def __init__(self, trainer: HfTrainer, model: nn.Module) -> None:
        assert isinstance(model, DistributedDataParallel)
        super().__init__(trainer, model)
        self._progress = _Progress.OUTSIDE
        self._is_synced = self._is_first = False
        self._has_computed = False  # a DDP pass with gradients, which arms the reducer
        self._is_armed = self._has_begun = False  # the reducer, and reducing, when it failed
        self._num_calls = self._num_exchanged = 0  # of DDP in this pass, and in this micro-batch
        self._sent: set[nn.Parameter] = set()  # parameters whose hooks the reducer has seen
        self._used: set[nn.Parameter] = set()  # parameters that got a gradient from a piece

    @classmethod
    def refusals(cls, trainer: HfTrainer) -> Iterator[str]:
        wrapped = trainer.model_wrapped
        if wrapped is trainer.model:
            yield from _judge_settings(trainer.accelerator.ddp_handler)
        elif isinstance(wrapped, DistributedDataParallel):
            yield from _judge_settings(wrapped)
        else:
            yield f"{type(wrapped).__name__}, instead of DDP, wraps the model of several processes"
            return
        if not finishes_here():
            yield "a trial showed that this torch's DDP does not finish in pieces: please report it"

    @property
    def bare(self) -> nn.Module:
        module: nn.Module = self.model.module
        return module

    @contextmanager
    def first_pass(self) -> Iterator[nn.Module]:
        # It exchanges buffers, and so does one that failed in its backward pass.
        self._num_calls, self._is_first = 0, True
        try:
            yield self.bare if self._has_begun else self.model
        finally:
            self._is_first = False

    def begin(self, micro: MicroBatch) -> None:
        self._progress, self._num_exchanged = _Progress.OUTSIDE, 0
        self._is_synced = self.model.require_backward_grad_sync
        self._has_computed = self._is_armed = self._has_begun = False
        self._sent, self._used = set(), set()

    def attempt(self, work: Callable[[], T], *, is_end: bool = True) -> T | DidNotFit:
        self._num_calls = 0
        with (
            self.model.register_forward_pre_hook(lambda *_: self._prepares()),
            self.bare.register_forward_pre_hook(lambda *_: self._computes()),
            self.bare.register_forward_hook(lambda *_: self._note_computed()),
        ):
            return super().attempt(work, is_end=is_end)

    def note_failure(self, phase: str, changed: set[nn.Parameter]) -> str:
        progress, self._progress = self._progress, _Progress.OUTSIDE
        has_computed, self._has_computed = self._has_computed, False
        if self._has_begun:
            return ""
        if progress == _Progress.PREPARING:
            return "it failed while DDP exchanged buffers or built its buckets, only once"
        self._is_armed |= has_computed and self._is_synced
        if self._is_armed and has_computed and phase == "backward":
            self._has_begun, self._sent = True, changed
        return ""

    @contextmanager
    def piece(self, is_last: bool) -> Iterator[nn.Module]:
        mark = GradientMark(self.bare.parameters())
        reaches_others = is_last and not self._has_begun
        needs_shadows = self._is_armed and not reaches_others
        self._num_calls = 0
        try:
            with shadow_parameters(self.bare) if needs_shadows else nullcontext():
                yield self.model if reaches_others else self.bare
        finally:
            self._used |= mark.find_changed()
        if reaches_others:
            self._sent = mark.find_changed()

    def finish(self) -> None:
        missing = self._used - self._sent
        if self._has_begun and not missing:
            raise RuntimeError(
                "survive_oom could not help: the pass failed after DDP had sent every gradient, "
                "and torch cannot undo the sums. To avoid that, "
                f"{SMALLER_MICRO_BATCH.flag(Door.ARGUMENTS)}"
            )
        # The last piece may not use every weight, such as that of an expert without tokens. DDP has
        # sent those that it found unused.
        if self._has_begun or (self._is_synced and not self.model.find_unused_parameters):
            send(missing)

    def _prepares(self) -> None:
        """Make DDP exchange buffers as often as on other ranks: once before each of its passes."""
        self._progress, self._num_calls = _Progress.PREPARING, self._num_calls + 1
        if self._num_calls <= self._num_exchanged:
            self.model.require_forward_param_sync = False  # DDP sets it again
        elif self._is_first:
            self.model.reducer._rebuild_buckets()  # without gradients, DDP skips this

    def _computes(self) -> None:
        if self._progress == _Progress.PREPARING:  # DPO with adapters also calls the bare model
            self._progress = _Progress.INSIDE
            # Without gradients DDP exchanges buffers only in the first of its passes.
            num = 1 if self._is_first else self._num_calls
            self._num_exchanged = max(self._num_exchanged, num)

    def _note_computed(self) -> None:
        if self._progress == _Progress.INSIDE:
            self._progress = _Progress.OUTSIDE
            self._has_computed |= torch.is_grad_enabled()


def _judge_settings(made_with: object) -> Iterator[str]:
    """Yield refusals due to DDP's settings, given its wrapper or its future arguments."""
    if getattr(made_with, "static_graph", False):
        yield "DDP with static_graph replays its first backward pass, and those of pieces differ"
    if getattr(made_with, "gradient_as_bucket_view", False):
        yield "DDP with gradient_as_bucket_view does not show which gradients are final"
    has_hook = str(getattr(made_with, "comm_hook", "no")) != "no"
    if has_hook or getattr(made_with, "_comm_hooks", None):
        yield "a DDP communication hook may run out of memory itself, while the other ranks wait"
    if not isinstance(made_with, DistributedDataParallel):
        return
    if made_with.mixed_precision is not None or made_with._delay_all_reduce_params:
        yield "DDP's own mixed_precision and delayed all-reduce keep state that an error breaks"
    if made_with._use_python_reducer:
        yield "DDP's python reducer (torch._dynamo.config.optimize_ddp) sends each piece"
    if made_with._join_config.enable:
        yield "DDP.join (join_uneven_inputs) counts forward passes, and pieces need more of them"


@contextmanager
def shadow_parameters(model: nn.Module) -> Iterator[None]:
    """Replace trainable parameters by others without hooks that share their numbers."""
    shadows = {p: nn.Parameter(p.detach()) for p in model.parameters() if p.requires_grad}
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if parameter in shadows
    ]
    for parameter, shadow in shadows.items():
        shadow.grad = parameter.grad
    for module, name, parameter in places:
        setattr(module, name, shadows[parameter])
    try:
        yield
    finally:
        for module, name, parameter in places:
            setattr(module, name, parameter)
        for parameter, shadow in shadows.items():
            parameter.grad = shadow.grad


def send(parameters: Iterable[nn.Parameter]) -> None:
    """Call the reducer's hooks of these parameters, with a backward pass that adds 0."""
    to = [p for p in parameters if p.requires_grad]
    torch.autograd.backward(
        to, [torch.zeros((), dtype=p.dtype, device=p.device).expand_as(p) for p in to]
    )


@cache
def finishes_here() -> bool:
    """Test on this torch whether DDP can finish a backward pass that failed half way."""
    # Once per process, in 0.02 s. The group stays: if it is freed while its thread drops a tensor,
    # which needs the interpreter, gloo may wait for that thread forever.

    def fail(_: object) -> None:
        raise RuntimeError("half way")

    try:
        alone = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        # `skip_init` draws no number, so this test does not change the run's sampling.
        fresh: Any = nn.utils.skip_init
        bare = nn.Sequential(*(fresh(nn.Linear, 1, 1, bias=False) for _ in range(2)))
        model = DistributedDataParallel(bare, process_group=alone)
        model.require_forward_param_sync = False
        if model.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            return False
        weights = [*bare.parameters()]
        for weight in weights:
            nn.init.ones_(weight)
            weight.grad = torch.ones_like(weight)
        hidden: list[torch.Tensor] = []
        with bare[0].register_forward_hook(lambda *args: hidden.append(args[-1])):
            loss = model(torch.ones(2, 1)).sum()
        torch.autograd.graph.register_multi_grad_hook(hidden, fail)
        mark = GradientMark(weights)
        noticed: list[torch.Tensor] = []
        hook = weights[0].register_post_accumulate_grad_hook
        hook(noticed.append)  # type: ignore[no-untyped-call]
        try:
            loss.backward()
        except RuntimeError:
            sent = mark.find_changed()
        else:
            return False
        for row in torch.ones(2, 1):
            with frozen(sent), shadow_parameters(bare):
                bare(row).sum().backward()
        if noticed:  # the shadows called a hook
            return False
        send(set(weights) - sent)
        # DDP refuses this unless the previous pass is finished.
        model(torch.ones(2, 1)).sum().backward()
        return sent == {weights[1]} and all(weight.grad == 5 for weight in weights)
    except RuntimeError:
        return False
