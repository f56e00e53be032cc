"""Alone: one process, which owes nobody anything."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.survival.attempt.attempt import DidNotFit, attempt
from trainer_plugins.survival.attempt.baseline import card_of
from trainer_plugins.survival.limit.limit import SLACK, most
from trainer_plugins.survival.ranks.base import Base
from trainer_plugins.survival.ranks.protocol import HowToRecover
from trainer_plugins.units import MIB

T = TypeVar("T")


class Alone(Base):
    """Handles one process: it divides, measures and rehearses by itself; see `Ranks`."""

    recovery: HowToRecover = "alone"
    forward_is_shared = False
    measures_together = False

    @classmethod
    def is_kind(cls, trainer: HfTrainer, model: nn.Module | None) -> bool:
        return True

    @classmethod
    def refusals(cls, trainer: HfTrainer) -> Iterator[str]:
        kind = str(trainer.accelerator.distributed_type).rpartition(".")[2]
        if kind != "NO":
            yield f"several processes ({kind}) are not supported yet"

    def agreed(self, limit: float) -> float:
        return limit

    def highest(self, value: int) -> int:
        return value

    def gradient(
        self, loss: Callable[[], torch.Tensor], parameters: list[nn.Parameter]
    ) -> list[torch.Tensor] | DidNotFit:
        return own_gradient(loss, parameters, self.trainer.args.device)

    def rehearsing(
        self, harmless: AbstractContextManager[object]
    ) -> AbstractContextManager[object]:
        return harmless

    def most(self, compute: Callable[[nn.Module, int], object], num: int, least: int) -> int:
        """Compute examples, on top of all gradients, to find out how many fit at once.

        All of them may take the last byte, as in training, and so may the least. What is between
        leaves `SLACK`. It is computed on the bare model: each rank rehearses by itself.
        """
        missing = [p for p in self.bare.parameters() if p.requires_grad and p.grad is None]
        try:
            if isinstance(attempt(partial(_add_gradients, missing)), DidNotFit):
                return 0
            held = {num: 0, least: 0}

            def fits(size: int) -> bool:
                held_bytes = held.get(size, self._slack_bytes())
                work = partial(self._compute_beside, partial(compute, self.bare), size, held_bytes)
                return not isinstance(self.attempt(work), DidNotFit)

            return most(fits, num, least, (num,))
        finally:
            for parameter in missing:
                parameter.grad = None

    def _slack_bytes(self) -> int:
        """Return how much to leave free: `SLACK`, and no less than a segment of the allocator."""
        card = card_of(self.trainer.args.device)
        reading = card.read() if card else None
        return max(2 * MIB, int(SLACK * reading.total_bytes)) if reading else 0

    def _compute_beside(self, compute: Callable[[int], object], size: int, held_bytes: int) -> None:
        """Compute so many examples while `held_bytes` of the card are taken."""
        held = torch.empty(held_bytes, dtype=torch.uint8, device=self.trainer.args.device)
        compute(size)
        del held


def own_gradient(
    loss: Callable[[], torch.Tensor], parameters: list[nn.Parameter], device: torch.device
) -> list[torch.Tensor] | DidNotFit:
    """Compute the gradient of a loss for each parameter, in float64 on the CPU."""

    def work() -> list[torch.Tensor]:
        with torch.enable_grad():
            gradients = torch.autograd.grad(loss(), parameters, allow_unused=True)
        return [
            torch.zeros(1).double() if g is None else g.flatten().cpu().double() for g in gradients
        ]

    return attempt(work, device=device)


def _add_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
