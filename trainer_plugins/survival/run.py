"""Run: what holds for one call of `trainer.train()`, shared by the engine and its recoveries."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from trainer_plugins.finding import Finding
from trainer_plugins.survival.attempt.baseline import card_of
from trainer_plugins.survival.attempt.marks import GradientMark
from trainer_plugins.survival.attempt.snapshot import Snapshot
from trainer_plugins.survival.certificate.certificate import Certificate
from trainer_plugins.survival.exact.layouts import (
    IndivisibleError,
    Inputs,
    Layout,
    Packed,
    find_layout,
)
from trainer_plugins.survival.exact.losses import Family
from trainer_plugins.survival.exact.modules import WatchedBuffers
from trainer_plugins.survival.exact.own_loss import is_foreign
from trainer_plugins.survival.memo import SurvivalMemo
from trainer_plugins.survival.micro_batch import Start
from trainer_plugins.survival.ranks import kind_of
from trainer_plugins.survival.ranks.gathers import Gathers
from trainer_plugins.survival.words import not_attached


@dataclass(slots=True)
class Attached:
    """A Trainer, what was found out about it, what the user wants, and the methods as they were."""

    trainer: Trainer
    family: Family
    min_micro_batch: int
    ladder: tuple[str, ...]
    plan_first: bool
    strict: bool
    vouched: bool
    """Whether the user vouches for a loss of which it is not known whether it can be divided."""

    compute_loss: Callable[..., Any]
    backward: Callable[..., Any]
    prediction_step: Callable[..., Any]


def memo_of(trainer: Trainer) -> SurvivalMemo:
    """The memo of a Trainer, which gets one where it has none, or none any more."""
    callbacks = trainer.callback_handler.callbacks
    if (
        memo := next(
            (callback for callback in callbacks if isinstance(callback, SurvivalMemo)), None
        )
    ) is None:
        memo = SurvivalMemo()
        trainer.callback_handler.add_callback(memo)  # a Trainer's own may refuse
        # The Trainer fills this in when it begins, and does not save a callback's state without it.
        trainer.state.stateful_callbacks.setdefault(SurvivalMemo.__name__, memo.state())
    return memo


class Run:
    """One training."""

    def __init__(self, attached: Attached, model: nn.Module) -> None:
        self.attached, self.ranks = attached, kind_of(attached.trainer, model)
        self.gathers = Gathers(attached.trainer)
        self.model = self.ranks.bare
        self.state = attached.trainer.state
        self.memo.card = self.memo.card or card_of(
            attached.trainer.args.device
        )  # none before a run has begun
        self.card = self.memo.card
        self.certificate = Certificate(attached.trainer, self.ranks, attached.family)
        self.is_refused = self.leftover_is_said = False
        self.is_division_said = False
        self.is_step_own = is_foreign(attached.trainer.training_step)
        """Whether `training_step` is a user's."""
        self.is_scale_seen = False
        """Whether it was measured by what `training_step` multiplies the loss (`handed.py`)."""
        self.is_final = False
        """Whether it was seen that gradients which a failed pass has changed are final (`finality.py`)."""
        self.what_moved: str | None = None
        """Which buffer the first forward pass has moved: empty where none, None before it."""
        # Listed once: it takes milliseconds for a large model with adapters. Recovery sees when it
        # has become wrong.
        self._parameters = tuple(model.parameters())

    def start(self) -> Start:
        """The moment before an attempt."""
        reading = self.card.read() if self.card else None
        # Where a failure throws every gradient away, none has to be told from the others.
        watched = self._parameters if self.ranks.window is None else ()
        return Start(
            Snapshot(self.attached.trainer),
            GradientMark(watched),
            reading.allocated_bytes if reading else 0,
        )

    def layout_of(self, inputs: Inputs) -> Layout:
        """How the examples lie.

        Raises:
            IndivisibleError: in no known way, or in one that this run cannot divide.
        """
        layout = find_layout(self.attached.family.layouts, inputs)
        if isinstance(layout, Packed) and getattr(
            self.attached.trainer, "neftune_noise_alpha", None
        ):
            raise IndivisibleError(
                "neftune_noise_alpha makes its noise smaller the longer a packed row is, so pieces would get more of it"
            )
        return layout

    def compute_loss(
        self, model: nn.Module, inputs: Inputs, num_items: torch.Tensor | int | None
    ) -> torch.Tensor:
        """The Trainer's own, but for what it exchanges with other ranks.

        Inputs are copied: trainers change theirs.
        """
        buffers = WatchedBuffers(self.model) if self.what_moved is None and model.training else None
        with self.gathers.held():
            loss: torch.Tensor = self.attached.compute_loss(
                model, dict(inputs), num_items_in_batch=num_items
            )
        if buffers is not None:
            self.what_moved = buffers.what_moved()
        return loss

    def has_exchanged_parameters(self) -> bool:
        """Whether the model has other parameters than when the run began."""
        return [id(p) for p in self._parameters] != [id(p) for p in self.model.parameters()]

    @property
    def memo(self) -> SurvivalMemo:
        """The run's own, which transformers may have exchanged at resume."""
        return memo_of(self.attached.trainer)

    def refuse_what_moves(self) -> bool:
        """Whether the first pass has moved a buffer, which is said then, and nothing is divided from now on.

        Raises:
            ValueError: where that was asked for.
        """
        if self.what_moved and not self.is_refused:
            self.is_refused = True
            self.refuse([self.what_moved])
        return bool(self.what_moved)

    def refuse(self, reasons: list[str]) -> None:
        """Say what speaks against this run, before anything of it is computed.

        Raises:
            ValueError: where that was asked for.
        """
        if self.attached.strict:
            raise ValueError(f"survive_oom cannot help this run: {'; '.join(reasons)}")
        self.say(not_attached(reasons))

    def say(self, finding: Finding) -> None:
        """Log it and write it down, at the step that is being computed."""
        self.memo.remark(self.attached.trainer.args, self.state.global_step + 1, finding)
