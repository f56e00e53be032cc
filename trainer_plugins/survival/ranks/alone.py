"""Ranks: the interface to processes that train together, alone or with votes."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.survival.attempt.attempt import DidNotFit, attempt, card_of
from trainer_plugins.survival.exact.gathers import Exchanging
from trainer_plugins.survival.limit.limit import SLACK, most, read_allowed_bytes
from trainer_plugins.survival.micro_batch import MicroBatch
from trainer_plugins.units import MIB
from trainer_plugins.upkeep.agreement import Agreement, RollCall

T = TypeVar("T")
Compute = Callable[[nn.Module, float], object]  # runs a model on that many examples
Loss = Callable[[], torch.Tensor]
Gradient = list[torch.Tensor] | DidNotFit


class HowToRecover(Enum):
    """Ways to finish a micro-batch that does not fit; `training/` has a class for each."""

    ALONE = auto()  # this rank divides it after a failure, and no other rank has to
    PLANNED = auto()  # all ranks divide it before computing, into equally many pieces
    AGAIN = auto()  # all ranks recompute all micro-batches of the step, in equally many pieces


class Ranks(Exchanging):
    """Handles a run of one process; each kind of parallelism overrides the differences."""

    recovery = HowToRecover.ALONE

    forward_is_shared = False  # other ranks take part in each forward pass, and measure together
    passes_twice = True  # rows may pass without gradients before the pieces
    keeps_gradients = True  # those that a failed pass has finished
    fatal: type[Exception] = torch.OutOfMemoryError  # errors in a measurement that end the run
    micros: list[MicroBatch]  # those of this step, if ranks recompute them after a failure
    tiny: Callable[[], object]  # runs a pass over a few tokens of this micro-batch
    apart: Callable[[], AbstractContextManager[object]]  # passes inside exchange no metrics
    options: Mapping[str, object] = {}  # the Trainer's arguments to `backward`

    def __init__(self, trainer: HfTrainer, model: nn.Module) -> None:
        self.trainer, self.model, self.micros = trainer, model, []
        self.device = trainer.args.device

    @classmethod
    def refusals(cls, trainer: HfTrainer) -> Iterator[str]:
        """Yield every reason why this kind is unsupported, or does not work on this torch."""
        kind = str(trainer.accelerator.distributed_type).rpartition(".")[2]
        if kind != "NO":
            yield f"several processes ({kind}) are not supported yet"

    @property
    def bare(self) -> nn.Module:
        """Return the model without its wrapper, if it can be computed that way."""
        return self.model

    @contextmanager
    def first_pass(self) -> Iterator[nn.Module]:
        """Surround a pass without gradients that may precede the pieces; yields the model."""
        yield self.model

    def absent(self, roll_call: RollCall, *, is_met: bool) -> str:
        """Name the ranks that do not take part; after a collective (`is_met`) none is late."""
        return ""

    def begin(self, micro: MicroBatch) -> None:
        """Begin a micro-batch."""

    def end(self) -> None:
        """Undo all changes to the model."""

    def find_outside(self) -> tuple[nn.Parameter, ...]:
        """Return the weights that the optimizer updates besides the model's, as of a loss."""
        known = {*self.model.parameters()}
        groups = getattr(self.trainer.optimizer, "param_groups", ())
        listed = (one for group in groups for one in group["params"])
        return tuple(one for one in listed if one.requires_grad and one not in known)

    def attempt(self, work: Callable[[], T], *, is_end: bool = True) -> T | DidNotFit:
        """Run work that may not fit; with `is_end` False a backward pass is still to come."""
        return attempt(work, self.device)

    def note_failure(self, phase: str, changed: set[nn.Parameter]) -> str:
        """Record an attempt that did not fit; return why the run cannot go on, empty if it can."""
        return ""

    @contextmanager
    def piece(self, is_last: bool) -> Iterator[nn.Module]:
        """Surround forward and backward of a piece; yields the model to use."""
        yield self.model

    def finish(self) -> None:
        """Complete what other ranks wait for, after all pieces of a micro-batch."""

    def agree(self, limit: float) -> float:
        """Return the limit in cells that holds for every rank dividing with this one."""
        return limit

    def highest(self, value: int) -> int:
        """Return the highest value of all ranks that divide with this one. Collective."""
        return value

    def lowest(self, value: int) -> int:
        """Return the lowest value of all ranks that divide with this one. Collective."""
        return -self.highest(-value)

    def on_any(self, answer: bool) -> bool:
        """Return whether any rank that divides with this one says yes. Collective."""
        return bool(self.highest(int(answer)))

    def gradient(self, loss: Loss, parameters: list[nn.Parameter]) -> Gradient:
        """Compute a gradient in float64 on the CPU: one tensor per parameter or reduction."""

        def work() -> list[torch.Tensor]:
            with torch.enable_grad():
                found = torch.autograd.grad(loss(), parameters, allow_unused=True)
            return [
                torch.zeros(1).double() if g is None else g.flatten().cpu().double() for g in found
            ]

        return attempt(work, self.device)

    def clear(self) -> None:
        """Discard every gradient of this optimizer step, on all ranks."""

    def forget(self) -> None:
        """Drop the gradients computed by a measurement."""

    def most(self, compute: Compute, num: int, least: int, parts: Sequence[float] = ()) -> int:
        """Find how many examples fit at once by computing them, on top of all gradients.

        If no try may fail, start with `parts` of an example.
        """
        # On the bare model: each rank rehearses alone. All examples, and the fewest allowed, may
        # use the last byte, as in training; sizes in between must leave `SLACK`.
        device = self.device
        reading = card_of(device).read()
        # At least one segment of the allocator.
        slack_bytes = (
            max(2 * MIB, int(SLACK * read_allowed_bytes(reading, device))) if reading else 0
        )
        trained = (*self.bare.parameters(), *self.find_outside())
        missing = [p for p in trained if p.requires_grad and p.grad is None]
        try:
            if isinstance(attempt(partial(_add_gradients, missing)), DidNotFit):
                return 0

            def work(size: int) -> None:
                held_bytes = 0 if size in (num, least) else slack_bytes
                held = torch.empty(held_bytes, dtype=torch.uint8, device=device)
                compute(self.bare, size)
                del held

            def fits(size: int) -> bool:
                return not isinstance(self.attempt(partial(work, size)), DidNotFit)

            return most(fits, num, least, (num,))
        finally:
            for parameter in missing:
                parameter.grad = None


def _add_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)


_NO_LIMIT = 1 << 60  # vote of a rank without a limit

_WAIT_SECONDS, _WAIT_IF_MET_SECONDS = 10.0, 1.0  # shorter if they have met before


class Together(Ranks):
    """Handles ranks that vote before they divide, measure or rehearse."""

    forward_is_shared = True

    def __init__(self, trainer: HfTrainer, model: nn.Module) -> None:
        super().__init__(trainer, model)
        self._votes = Agreement(trainer.args.ddp_timeout)
        self.exchanges = {"gather": self._gather, "reduce": self._reduce}

    def find_outside(self) -> tuple[nn.Parameter, ...]:
        return ()  # a sharded optimizer has weights of its own

    def absent(self, roll_call: RollCall, *, is_met: bool) -> str:
        missing = roll_call.missing(_WAIT_IF_MET_SECONDS if is_met else _WAIT_SECONDS)
        return f"{missing}; give every rank the same callbacks" if missing else ""

    def agree(self, limit: float) -> float:
        """Return the lowest limit of all ranks, in whole cells: a fraction more never fitted."""
        lowest = self.lowest(_NO_LIMIT if math.isinf(limit) else math.floor(limit))
        return math.inf if lowest == _NO_LIMIT else float(lowest)

    def highest(self, value: int) -> int:
        return self._check_answer(self._votes.highest(value))

    def _gather(self, value: torch.Tensor) -> torch.Tensor:
        """Do the same as accelerate's `gather`, with a tensor on the CPU."""
        values = self._votes.gather(value.reshape(1) if value.dim() == 0 else value)
        return torch.cat(self._check_answer(values))

    def _reduce(
        self, value: torch.Tensor, reduction: str = "sum", scale: float = 1.0
    ) -> torch.Tensor:
        """Do the same as accelerate's `reduce`, with a tensor on the CPU."""
        values = torch.stack(self._check_answer(self._votes.gather(value)))
        if reduction == "max":
            return values.amax(0)
        total = values.sum(0)
        return total / len(values) if reduction == "mean" else total

    def _check_answer(self, found: T | None) -> T:
        if found is None:
            raise RuntimeError(self._explain_no_answer())
        return found

    def _explain_no_answer(self) -> str:
        raise NotImplementedError
