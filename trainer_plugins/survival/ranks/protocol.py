"""Protocol: what survival asks of the processes that train together, whatever kind of run it is."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import torch
from torch import nn

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.survival.attempt.attempt import DidNotFit
from trainer_plugins.survival.micro_batch import MicroBatch
from trainer_plugins.upkeep.roll_call import RollCall

T = TypeVar("T")

HowToRecover = Literal["alone", "planned", "again"]
"""How a micro-batch that does not fit is finished; the classes are in `training/recoveries.py`.

* "alone": this rank divides it after a failure, and no other rank has to.
* "planned": all ranks divide it before it is computed, into equally many pieces.
* "again": all ranks compute the whole window again, in equally many pieces.
"""


@dataclass(frozen=True, slots=True)
class Window:
    """Holds what ranks compute again together: the micro-batches of this optimizer step."""

    micros: list[MicroBatch]
    clear: Callable[[], None]
    """Throws away every gradient of this optimizer step, on all ranks."""


class Ranks(Protocol):
    """Handles one kind of run: one process, or several that share a micro-batch in one way.

    Args:
        trainer: the Trainer of the run.
        model: the model as the Trainer calls it, in its wrapper.
    """

    recovery: HowToRecover

    forward_is_shared: bool
    """Whether other ranks take part in each forward pass, that of an evaluation too."""

    measures_together: bool
    """Whether ranks measure and judge together how pieces add up; they measure gradients then."""

    options: Mapping[str, object]
    """Options that the Trainer passes to `accelerator.backward` besides the loss."""

    def __init__(self, trainer: HfTrainer, model: nn.Module) -> None: ...

    @classmethod
    def is_kind(cls, trainer: HfTrainer, model: nn.Module | None) -> bool:
        """Tell whether a Trainer's ranks are of this kind.

        Args:
            trainer: the Trainer.
            model: the model as the Trainer calls it; None before the first micro-batch.
        """

    @classmethod
    def refusals(cls, trainer: HfTrainer) -> Iterator[str]:
        """Give every reason why this kind cannot be helped, or does not work on this torch."""

    @property
    def window(self) -> Window | None:
        """Return what is computed again after a failure; None unless `recovery` is "again"."""

    @property
    def bare(self) -> nn.Module:
        """Return the model without its wrapper, if it can be computed without."""

    def absent(self, roll_call: RollCall, *, is_met: bool) -> str:
        """Say which ranks do not take part, where every one has to; empty if all do.

        Args:
            roll_call: what this rank has signed, if it takes part.
            is_met: whether the ranks have met in a collective of the Trainer, since each of them
                could attach: none is on its way then.
        """

    def prepare(self, tiny: Callable[[], object]) -> None:
        """Learn of the next micro-batch, before it is rehearsed or begun.

        Args:
            tiny: runs forward and backward over the first tokens of one of its examples.
        """

    def begin(self, micro: MicroBatch) -> None:
        """Begin a micro-batch."""

    def end(self) -> None:
        """Undo what was changed on the model."""

    def kept(self, parameters: tuple[nn.Parameter, ...]) -> tuple[nn.Parameter, ...]:
        """Return the parameters that keep the gradient which a failed pass has finished."""

    def attempt(
        self,
        work: Callable[[], T],
        release: Callable[[], object] | None = None,
        *,
        is_end: bool = True,
    ) -> T | DidNotFit:
        """Run work that may not fit, here or on a rank that has to stop with this one.

        Args:
            work: what is tried.
            release: called after a failure, to let go of what frames above this one hold.
            is_end: whether `work` ends with a backward pass; after a forward pass alone the
                backward pass is still to come.
        """

    def failed(self, phase: str, is_last: bool, changed: set[nn.Parameter]) -> str:
        """Note that an attempt did not fit.

        Args:
            phase: the "forward" or the "backward" pass.
            is_last: whether no other piece of the micro-batch would have come after it.
            changed: the parameters that received their gradient before it failed.

        Returns:
            Why this run cannot go on from there; empty if it can.
        """

    def part_failed(self, error: Exception) -> None:
        """Note that a part raised an error of its own while it was measured.

        Raises:
            Exception: that error, if other ranks would wait for this one.
        """

    def piece(self, is_last: bool) -> AbstractContextManager[nn.Module]:
        """Surround forward and backward of a piece; gives the model to compute it on."""

    def finished(self) -> None:
        """Finish what this rank owes the others, after every piece of a micro-batch is computed."""

    def agreed(self, limit: float) -> float:
        """Return the limit in cells that holds for every rank which divides with this one."""

    def highest(self, value: int) -> int:
        """Return the highest value of all ranks that divide with this one; all of them ask."""

    def gradient(
        self, loss: Callable[[], torch.Tensor], parameters: list[nn.Parameter]
    ) -> list[torch.Tensor] | DidNotFit:
        """Compute the gradient of a loss, in float64 on the CPU; none is accumulated.

        Returns:
            One tensor for each parameter, or for each reduction between the ranks.
        """

    def forget(self) -> None:
        """Drop the gradients that a measurement has computed."""

    def rehearsing(
        self, harmless: AbstractContextManager[object]
    ) -> AbstractContextManager[object]:
        """Return the context in which a rehearsal runs.

        Args:
            harmless: logs an error of the rehearsal and lets training go on. A rank for which
                others wait has to raise it instead.
        """

    def most(self, compute: Callable[[nn.Module, int], object], num: int, least: int) -> int:
        """Compute examples, on top of all gradients, to find out how many fit at once.

        The gradients are dropped again.

        Args:
            compute: forward and backward of so many examples, on a model.
            num: how many examples there are.
            least: fewer are never computed at once.
        """
