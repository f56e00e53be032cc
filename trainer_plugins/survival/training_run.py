"""Run: the state of one call of `trainer.train()`, shared by the engine and its recoveries."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer_plugins.finding import Finding
from trainer_plugins.hf_trainer import HfBackward, HfTrainer
from trainer_plugins.survival.attempt.baseline import card_of
from trainer_plugins.survival.attempt.marks import GradientMark
from trainer_plugins.survival.attempt.restore_point import RestorePoint
from trainer_plugins.survival.attempt.state import State
from trainer_plugins.survival.certificate.certificate import Certificate
from trainer_plugins.survival.exact.delegated import why_not_delegated
from trainer_plugins.survival.exact.layouts import (
    IndivisibleError,
    Inputs,
    Layout,
    Packed,
    find_layout,
)
from trainer_plugins.survival.exact.losses import VOUCH, Family
from trainer_plugins.survival.exact.modules import full_state, owners_of_state, why_not_divided
from trainer_plugins.survival.exact.own_loss import is_foreign
from trainer_plugins.survival.memo import SurvivalMemo
from trainer_plugins.survival.micro_batch import Start
from trainer_plugins.survival.ranks import Ranks, kind_of
from trainer_plugins.survival.ranks.gathers import Gathers
from trainer_plugins.survival.words import not_attached


@dataclass(slots=True)
class Attached:
    """Holds a Trainer, what was found out about it, the user's options and the original methods."""

    trainer: HfTrainer
    family: Family
    min_micro_batch: int
    ladder: tuple[str, ...]
    plan_first: bool
    strict: bool
    vouched: bool
    """Whether the user vouches for a loss if it is not known whether it can be divided."""

    compute_loss: Callable[..., Any]
    backward: HfBackward
    prediction_step: Callable[..., Any]


def memo_of(trainer: HfTrainer) -> SurvivalMemo:
    """Return the memo of a Trainer; a Trainer that has none, or lost it, gets one."""
    callbacks = trainer.callback_handler.callbacks
    memo = next((callback for callback in callbacks if isinstance(callback, SurvivalMemo)), None)
    if memo is None:
        memo = SurvivalMemo()
        trainer.callback_handler.add_callback(memo)  # a Trainer's own may refuse
        # The Trainer fills this in when it begins, and does not save a callback's state without it.
        trainer.state.stateful_callbacks.setdefault(SurvivalMemo.__name__, memo.state())
    return memo


class TrainingRun:
    """Holds the state of one training.

    Args:
        attached: the Trainer, and what is known of it.
        model: the model as the Trainer calls it, in its wrapper.
    """

    def __init__(self, attached: Attached, model: nn.Module) -> None:
        self.attached = attached
        self.ranks: Ranks = kind_of(attached.trainer, model)(attached.trainer, model)
        self.gathers = Gathers(attached.trainer)
        self.model = self.ranks.bare
        self.state = attached.trainer.state
        # The memo has none before a run has begun.
        self.memo.card = self.memo.card or card_of(attached.trainer.args.device)
        self.card = self.memo.card
        self.certificate = Certificate(attached.trainer, self.ranks, attached.family)
        self.is_refused = self.leftover_is_said = False
        self.is_division_said = self.is_division_refused = False
        self.is_step_own = is_foreign(attached.trainer.training_step)
        """Whether `training_step` is the user's own."""
        self.is_scale_seen = False
        """Whether it was measured by what `training_step` multiplies the loss (`handed.py`)."""
        self.is_final = False
        """Whether gradients that a failed pass has changed were found final (`finality.py`)."""
        self.what_moved: str | None = None
        """Why a pass forbids a division: it has moved something, or its loss was the user's own.

        It is empty if nothing does, and None before the first.
        """
        self._owners = owners_of_state(self.ranks.bare)
        # Listed once: it takes milliseconds for a large model with adapters. Recovery notices when
        # the list has become wrong.
        self._parameters = tuple(model.parameters())

    def start(self) -> Start:
        """Take down the moment before an attempt."""
        reading = self.card.read() if self.card else None
        return Start(
            RestorePoint(self.attached.trainer, state=State(self._owners)),
            GradientMark(self.ranks.kept(self._parameters)),
            reading.allocated_bytes if reading else 0,
        )

    def layout_of(self, inputs: Inputs) -> Layout:
        """Find out how the examples lie in a micro-batch.

        Raises:
            IndivisibleError: in no known way, or in one that this run cannot divide.
        """
        layout = find_layout(self.attached.family.layouts, inputs)
        if isinstance(layout, Packed) and getattr(
            self.attached.trainer, "neftune_noise_alpha", None
        ):
            raise IndivisibleError(
                "neftune_noise_alpha makes its noise smaller the longer a packed row is, so pieces "
                "would get more of it"
            )
        return layout

    def compute_loss(
        self, model: nn.Module, inputs: Inputs, num_items: torch.Tensor | int | None
    ) -> torch.Tensor:
        """Call the Trainer's own `compute_loss`, with its exchanges between ranks held.

        Inputs are copied, because trainers change theirs.
        """
        state = self.full_state() if self.what_moved is None and model.training else None
        with self.gathers.held():
            loss: torch.Tensor = self.attached.compute_loss(
                model, dict(inputs), num_items_in_batch=num_items
            )
        if state is not None:
            moved = state.moved()
            self.what_moved = why_not_divided(moved.values())
            if moved:  # checkpointing computes passes again, and would count those
                ladder = tuple(rung for rung in self.attached.ladder if rung != "checkpointing")
                self.attached.ladder = ladder
        if why := why_not_delegated(self.attached.compute_loss):
            self.what_moved = why + VOUCH
        return loss

    def full_state(self) -> State:
        """Take down all that a pass may move."""
        return full_state(self.ranks.bare, has_parameters=not self.ranks.forward_is_shared)

    def tiny_pass(self, inputs: Inputs, num_items: torch.Tensor | int | None) -> None:
        """Run forward and backward over the first tokens of one example.

        Raises:
            IndivisibleError: one example cannot be taken out.
        """
        tiny = find_layout(self.attached.family.layouts, inputs).probe(inputs, 1)
        with self.attached.trainer.compute_loss_context_manager():
            loss = self.attached.compute_loss(self.model, tiny, num_items_in_batch=num_items)
        self.attached.backward(loss)

    def has_exchanged_parameters(self) -> bool:
        """Tell whether the model has other parameters than when the run began."""
        return [id(p) for p in self._parameters] != [id(p) for p in self.model.parameters()]

    @property
    def memo(self) -> SurvivalMemo:
        """Return the memo of this run, which transformers may have exchanged at resume."""
        return memo_of(self.attached.trainer)

    def refuse_what_moves(self) -> bool:
        """Refuse a run in which a forward pass forbids a division, and tell whether one has.

        It is said once, and nothing is divided from then on.

        Raises:
            ValueError: one has, and the user wants an error then.
        """
        is_new, self.is_division_refused = not self.is_division_refused, bool(self.what_moved)
        if self.what_moved and is_new and not self.is_refused:
            # Which loss is computed may depend on the rows. A rank that is refused answers no other
            # rank any more, so one among several stays, and is not divided.
            is_own_loss = bool(why_not_delegated(self.attached.compute_loss))
            self.is_refused = not is_own_loss or self.attached.trainer.args.world_size == 1
            self.refuse([self.what_moved])
        return self.is_refused

    def refuse(self, reasons: list[str]) -> None:
        """Say why this run cannot be helped, before anything of it is computed.

        Raises:
            ValueError: the user wants an error then.
        """
        if self.attached.strict:
            raise ValueError(f"survive_oom cannot help this run: {'; '.join(reasons)}")
        self.say(not_attached(reasons))

    def say(self, finding: Finding) -> None:
        """Log a finding and write it into the timeline, at the step that is being computed."""
        self.memo.remark(self.attached.trainer.args, self.state.global_step + 1, finding)
