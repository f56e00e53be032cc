"""Run: the state of one call of `trainer.train()`, shared by the engine and its recoveries."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer_plugins.finding import Finding
from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.survival.attempt.attempt import judge_left_over
from trainer_plugins.survival.attempt.holders import Roots
from trainer_plugins.survival.attempt.roots import find_loss_roots, roots_of_state
from trainer_plugins.survival.attempt.state import (
    RestorePoint,
    State,
    explain_not_divided,
)
from trainer_plugins.survival.attempt.users_code import is_users_function
from trainer_plugins.survival.certificate.certificate import Certificate
from trainer_plugins.survival.exact.coupled import ROW
from trainer_plugins.survival.exact.finality import GradientMark
from trainer_plugins.survival.exact.gathers import Gathers
from trainer_plugins.survival.exact.layouts import Layout, Packed, find_layout
from trainer_plugins.survival.exact.losses import VOUCH, Family
from trainer_plugins.survival.exact.own_loss import Delegation
from trainer_plugins.survival.exact.shares import IndivisibleError, Inputs, NumItems
from trainer_plugins.survival.limit.ladder import CHECKPOINTING
from trainer_plugins.survival.memo import memo_of
from trainer_plugins.survival.micro_batch import Start
from trainer_plugins.survival.ranks import kind_of
from trainer_plugins.survival.ranks.alone import Ranks
from trainer_plugins.survival.words import report_not_attached
from trainer_plugins.wrapped import is_compiled


@dataclass(slots=True, kw_only=True)
class Attached:
    """A Trainer, facts about it, the user's options and the original methods."""

    trainer: HfTrainer
    family: Family
    kind: type[Ranks]  # how its ranks share a micro-batch
    min_micro_batch: int
    ladder: tuple[str, ...]
    plan_first: bool
    rows_at_once: int  # of the longest; 0: as many as fit
    is_strict: bool
    is_vouched: bool  # the user vouches for an unknown loss
    compute_loss: Callable[..., Any]
    backward: Callable[..., None]
    prediction_step: Callable[..., Any]
    batch_type: Callable[[Inputs], Any] = dict  # of the user's batches, built as the Trainer does

    @property
    def why_own_loss(self) -> str:
        """Return why the last computed loss was the user's own; empty if it was the library's."""
        return self.compute_loss.why_not if isinstance(self.compute_loss, Delegation) else ""

    def check_loss_of_part(self) -> None:
        if why := self.why_own_loss:
            raise IndivisibleError(why)

    def refuse(self, reasons: list[str]) -> None:
        if self.is_strict:
            raise ValueError(f"survive_oom cannot help this run: {'; '.join(reasons)}")
        self.say(report_not_attached(reasons))

    def say(self, finding: Finding) -> None:
        step = self.trainer.state.global_step + 1
        memo_of(self.trainer).remark(self.trainer.args, step, finding)


class TrainingRun:
    """The state of one training; `model` is in its wrapper, as the Trainer calls it."""

    def __init__(self, attached: Attached, model: nn.Module) -> None:
        self.attached, self.wrapped = attached, model
        self.ranks = kind_of(attached.trainer, model)(attached.trainer, model)
        self.gathers = Gathers(attached.trainer, self.ranks)
        self.ranks.apart = self.gathers.apart
        self.model = self.ranks.bare
        # transformers may replace it at resume, before the first step, when a run begins.
        self.memo = memo_of(attached.trainer)
        self.card = self.memo.card_for(attached.trainer.args)
        self.has_met_batch = self.is_refused = self.leftover_is_said = False
        self.is_division_said = self.is_division_refused = False
        self.is_step_own = is_users_function(attached.trainer.training_step)  # the user's own
        self.is_scale_seen = False  # the factor of `training_step` was measured
        self.is_final = False  # changed gradients were found final (`finality.py`)
        # Why a pass forbids splitting: its changes, or its loss's source; None before the first.
        self.what_moved: str | None = None
        self.is_compiled = is_compiled(model)
        if self.is_compiled:  # the others hook into forward passes
            attached.ladder = tuple(rung for rung in attached.ladder if rung == CHECKPOINTING)
        self._roots = self._model_roots = roots_of_state(self.ranks.bare)
        self._loss_roots = find_loss_roots(attached.trainer)
        if attached.family.is_vouched:  # a loss of the user's own may depend on what it keeps
            self._roots, self._loss_roots = self._roots.join(self._loss_roots), Roots({}, ())
        self.certificate = Certificate(self.ranks, self.gathers, attached.family, self._roots)
        # Listing takes milliseconds, so do it once. Recovery notices if the list becomes wrong.
        self.parameters = self._list_parameters()

    def start(self) -> Start:
        return Start(
            RestorePoint(
                self.attached.trainer,
                state=State(self._roots),
                notes=self.certificate.notes,
                loss=State(self._loss_roots),
            ),
            GradientMark(self.parameters if self.ranks.keeps_gradients else ()),
            self.card.read_allocated_bytes(),
        )

    def num_graphs(self) -> int:
        """Return how many graphs torch.compile has compiled in this process."""
        if not self.is_compiled:
            return 0
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    @contextmanager
    def measuring(self) -> Iterator[Callable[[], None]]:
        """Undo the draws and counts of a measurement, at its end and by the yielded call."""
        before = self.start().snapshot
        # Intercepted code would not be compiled from then on.
        eagerly = torch.compiler.set_stance("force_eager") if self.is_compiled else nullcontext()
        try:
            with eagerly, self.gathers.apart():
                yield before.put_back
        finally:
            before.restore()
            self.ranks.forget()

    def look_for_leftover(self, start: Start) -> None:
        if self.leftover_is_said:
            return
        expected_bytes = start.allocated_bytes + start.mark.new_bytes()
        with self.memo.harmless():
            if finding := judge_left_over(self.card, expected_bytes):
                self.leftover_is_said = True
                self.attached.say(finding)

    def layout_of(self, inputs: Inputs) -> Layout:
        layout = find_layout(self.attached.family.layouts, inputs)
        if isinstance(layout, Packed) and self.attached.trainer.neftune_noise_alpha:
            raise IndivisibleError(
                "neftune_noise_alpha scales its noise down with the length of a packed row,"
                " so pieces would get more noise"
            )
        return layout

    def compute_loss(self, model: nn.Module, inputs: Inputs, num_items: NumItems) -> torch.Tensor:
        """Call the Trainer's own `compute_loss` on a copy of the inputs, which trainers modify."""
        attached = self.attached
        without_numbers = {name: value for name, value in inputs.items() if name != ROW}
        batch = attached.batch_type(without_numbers)
        is_first = self.what_moved is None and model.training
        state = self.certificate.full_state(self._model_roots) if is_first else None
        with self.gathers.hold(), self._give_to_loss(model):
            loss: torch.Tensor = attached.compute_loss(model, batch, num_items_in_batch=num_items)
        if state is not None:
            moved = state.find_moved()
            self.what_moved = explain_not_divided(moved.values())
            if moved:  # checkpointing recomputes passes, which would count again
                attached.ladder = tuple(rung for rung in attached.ladder if rung != CHECKPOINTING)
        if why := attached.why_own_loss:
            self.what_moved = why + VOUCH
        return loss

    @contextmanager
    def _give_to_loss(self, model: nn.Module) -> Iterator[None]:
        """Set this model in losses that keep the wrapped one, as sentence-transformers' do."""
        losses: Any = getattr(self.attached.trainer, "loss", None)
        keepers = [
            part
            for loss in (losses.values() if isinstance(losses, dict) else [losses])
            if model is not self.wrapped and isinstance(loss, nn.Module)
            for part in loss.modules()
            if getattr(part, "model", None) is self.wrapped
        ]
        for part in keepers:
            part.model = model
        try:
            yield
        finally:
            for part in keepers:
                part.model = self.wrapped

    def tiny_pass(self, inputs: Inputs, num_items: NumItems) -> None:
        layout = find_layout(self.attached.family.layouts, inputs)
        tiny = self.attached.batch_type(layout.probe(inputs, 1))
        with self.gathers.hold(), self.attached.trainer.compute_loss_context_manager():
            loss = self.attached.compute_loss(self.model, tiny, num_items_in_batch=num_items)
        self.attached.backward(loss)

    def has_exchanged_parameters(self) -> bool:
        return [*map(id, self.parameters)] != [*map(id, self._list_parameters())]

    def _list_parameters(self) -> tuple[nn.Parameter, ...]:
        return (*self.model.parameters(), *self.ranks.find_outside())

    def refuse_what_moves(self) -> bool:
        """Refuse, once, a run in which a pass forbids splitting; return whether it is refused."""
        is_new, self.is_division_refused = not self.is_division_refused, bool(self.what_moved)
        if self.what_moved and is_new and not self.is_refused:
            # The choice of loss may depend on the rows. A refused rank no longer answers the
            # others, so with several ranks it stays, without dividing.
            is_own_loss = bool(self.attached.why_own_loss)
            self.is_refused = not is_own_loss or self.attached.trainer.args.world_size == 1
            self.attached.refuse([self.what_moved])
        return self.is_refused
