"""Ranks: what survival asks of the processes that train together, as one process answers it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.survival.attempt.attempt import DidNotFit, Release, attempt, card_of
from trainer_plugins.survival.limit.limit import SLACK, most
from trainer_plugins.survival.micro_batch import MicroBatch
from trainer_plugins.units import MIB
from trainer_plugins.upkeep.roll_call import RollCall

T = TypeVar("T")


class HowToRecover(Enum):
    """Says how a micro-batch that does not fit is finished; `training/` has a class for each."""

    ALONE = auto()  # this rank divides it after a failure, and no other rank has to
    PLANNED = auto()  # all ranks divide it before it is computed, into equally many pieces
    AGAIN = auto()  # all ranks compute all micro-batches of the step again, in equally many pieces


class Ranks:
    """Handles a run of one process; each kind of several ranks overrides what differs."""

    recovery = HowToRecover.ALONE

    forward_is_shared = False  # whether other ranks take part in each forward pass
    measures_together = False  # whether ranks judge together; they measure gradients then
    micros: list[MicroBatch]  # those of this step, if ranks compute them again after a failure
    options: Mapping[str, object] = {}  # what the Trainer passes to `backward`

    def __init__(self, trainer: HfTrainer, model: nn.Module) -> None:
        self.trainer, self.model, self.micros = trainer, model, []

    @classmethod
    def refusals(cls, trainer: HfTrainer) -> Iterator[str]:
        """Give every reason why this kind cannot be helped, or does not work on this torch."""
        kind = str(trainer.accelerator.distributed_type).rpartition(".")[2]
        if kind != "NO":
            yield f"several processes ({kind}) are not supported yet"

    def late_refusals(self) -> Iterator[str]:
        """Give what a callback may have set since the run began, and which forbids a division."""
        yield from ()

    @property
    def bare(self) -> nn.Module:
        """Return the model without its wrapper, if it can be computed without."""
        return self.model

    def absent(self, roll_call: RollCall, *, is_met: bool) -> str:
        """Say which ranks do not take part; after a collective (`is_met`) none is on its way."""
        return ""

    def prepare(self, tiny: Callable[[], object]) -> None:
        """Learn of the next micro-batch; `tiny` runs a pass over a few tokens of it."""

    def begin(self, micro: MicroBatch) -> None:
        """Begin a micro-batch."""

    def end(self) -> None:
        """Undo what was changed on the model."""

    def kept(self, parameters: tuple[nn.Parameter, ...]) -> tuple[nn.Parameter, ...]:
        """Return the parameters that keep the gradient which a failed pass has finished."""
        return parameters

    def attempt(
        self, work: Callable[[], T], release: Release = None, *, is_end: bool = True
    ) -> T | DidNotFit:
        """Run work that may not fit; with `is_end` False a backward pass is still to come."""
        return attempt(work, release, self.trainer.args.device)

    def failed(self, phase: str, is_last: bool, changed: set[nn.Parameter]) -> str:
        """Note an attempt that did not fit; say why the run cannot go on, empty if it can."""
        return ""

    def part_failed(self, error: Exception) -> None:
        """Note an error of a part's own, or raise it if other ranks would wait for this one."""

    @contextmanager
    def piece(self, is_last: bool) -> Iterator[nn.Module]:
        """Surround forward and backward of a piece; gives the model to compute it on."""
        yield self.model

    def finished(self) -> None:
        """Finish what the other ranks wait for, after every piece of a micro-batch is computed."""

    def agreed(self, limit: float) -> float:
        """Return the limit in cells that holds for every rank which divides with this one."""
        return limit

    def highest(self, value: int) -> int:
        """Return the highest value of all ranks that divide with this one; all of them ask."""
        return value

    def lowest(self, value: int) -> int:
        """Return the lowest value of all ranks that divide with this one; all of them ask."""
        return -self.highest(-value)

    def on_any(self, answer: bool) -> bool:
        """Tell whether the answer is yes on a rank that divides with this one; all of them ask."""
        return bool(self.highest(int(answer)))

    def gradient(
        self, loss: Callable[[], torch.Tensor], parameters: list[nn.Parameter]
    ) -> list[torch.Tensor] | DidNotFit:
        """Compute a gradient in float64 on the CPU, in a tensor a parameter or a reduction."""

        def work() -> list[torch.Tensor]:
            with torch.enable_grad():
                found = torch.autograd.grad(loss(), parameters, allow_unused=True)
            return [
                torch.zeros(1).double() if g is None else g.flatten().cpu().double() for g in found
            ]

        return attempt(work, device=self.trainer.args.device)

    def clear(self) -> None:
        """Throw away every gradient of this optimizer step, on all ranks."""

    def forget(self) -> None:
        """Drop the gradients that a measurement has computed."""

    def rehearsing(
        self, harmless: AbstractContextManager[object]
    ) -> AbstractContextManager[object]:
        """Return the context of a rehearsal: `harmless` logs its error, but not if others wait."""
        return harmless

    def most(self, compute: Callable[[nn.Module, int], object], num: int, least: int) -> int:
        """Compute examples, on top of all gradients, to find out how many fit at once."""
        # On the bare model: each rank rehearses by itself. All examples, and the least, may take
        # the last byte, as in training; what is between leaves `SLACK`.
        missing = [p for p in self.bare.parameters() if p.requires_grad and p.grad is None]
        try:
            if isinstance(attempt(partial(_add_gradients, missing)), DidNotFit):
                return 0

            def fits(size: int) -> bool:
                held_bytes = 0 if size in (num, least) else self._slack_bytes()
                work = partial(self._compute_holding, partial(compute, self.bare), size, held_bytes)
                return not isinstance(self.attempt(work), DidNotFit)

            return most(fits, num, least, (num,))
        finally:
            for parameter in missing:
                parameter.grad = None

    def _slack_bytes(self) -> int:
        """Return how much to leave free: `SLACK`, and no less than a segment of the allocator."""
        reading = card_of(self.trainer.args.device).read()
        return max(2 * MIB, int(SLACK * reading.total_bytes)) if reading else 0

    def _compute_holding(
        self, compute: Callable[[int], object], size: int, held_bytes: int
    ) -> None:
        held = torch.empty(held_bytes, dtype=torch.uint8, device=self.trainer.args.device)
        compute(size)
        del held


def _add_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
