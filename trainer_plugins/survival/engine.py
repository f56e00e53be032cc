"""The engine: stands before `trainer.compute_loss` and `trainer.accelerator.backward`, and finishes what did not fit.

Invariants, and where each is kept:

* The gradient of a micro-batch is the weighted sum of its pieces': `losses.py` says so, `certificate.py` measures it.
* No parameter receives the gradient of an example twice: `Piece.final`, from `GradientMark.changed`.
* A failed attempt leaves no tensor (`attempt.py`), no drawn number and no metric (`snapshot.py`).
* The loss is scaled between the two as the Trainer does it: `_scale`, and `_wrong_scale` looks.
* Where everything fits, nothing is copied, computed or waited for.

Not `training_step`: TRL's trainers generate, slice and count in theirs, which must be entered once a micro-batch. And
not a callback: none is called inside a micro-batch.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import nn

from trainer_plugins.survival.attempt import DidNotFit
from trainer_plugins.survival.layouts import IndivisibleError, Inputs
from trainer_plugins.survival.micro_batch import MicroBatch, Piece
from trainer_plugins.survival.recovery import Recovery, find_layout, tiny_pass
from trainer_plugins.survival.refusals import refusals
from trainer_plugins.survival.replay import Replay
from trainer_plugins.survival.run import Attached, Run


class Engine:
    """Of one Trainer."""

    def __init__(self, attached: Attached) -> None:
        self.is_attached = True
        self._attached = attached
        self._run: Run | None = None
        self._current: MicroBatch | None = None

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Inputs,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """In the place of `trainer.compute_loss`. What was done in pieces comes back as a loss without their graphs."""
        is_training = model.training and torch.is_grad_enabled() and not return_outputs
        run = self._run_of(model, inputs) if is_training and self.is_attached else None
        if run is None or run.is_refused:
            return self._attached.compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        # A copy for each attempt: trainers take labels out of theirs, and put flags in.
        micro = MicroBatch(Piece(dict(inputs), 1), num_items_in_batch, self._scale(num_items_in_batch), run.start())
        run.ranks.begin(micro, partial(tiny_pass, run, micro))
        # A limit is the same on all ranks that divide together, so all of them ask, or none.
        if math.isinf(run.memo.limit) or not run.ranks.most(micro.whole.num_cells > run.memo.limit):
            loss = run.ranks.attempt(
                partial(self._attached.compute_loss, model, dict(inputs), num_items_in_batch=num_items_in_batch),
                is_end=False,
            )
            if not isinstance(loss, DidNotFit):
                micro.value, self._current = loss.detach(), micro
                return loss.clone() if loss._is_view() else loss  # `detach_` in `backward` takes no view
            recovery = _recovery(run, micro)
            recovery.failed(micro.whole, micro.start, loss, "forward")
        else:
            recovery = _recovery(run, micro)
        micro.value = recovery.finish()
        micro.is_finished, self._current = True, micro
        return micro.value.clone().requires_grad_().clone()

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """In the place of `trainer.accelerator.backward`."""
        micro, self._current = self._current, None
        if micro is None or self._run is None:
            self._attached.backward(loss, **options)
        elif micro.is_finished:
            if wrong := _wrong_scale(micro, loss):
                raise RuntimeError(f"{wrong}, so the gradients of this step are wrong: detach survive_oom")
        else:
            # The caller's frames hold the loss, and with it the graph.
            work = partial(self._attached.backward, loss, **options)
            failure = self._run.ranks.attempt(work, release=partial(_cut_off, loss))
            if isinstance(failure, DidNotFit):
                recovery = _recovery(self._run, micro, **options)
                recovery.failed(micro.whole, micro.start, failure, "backward", why_not=_wrong_scale(micro, loss))
                recovery.finish()

    def end_run(self) -> None:
        """Put back what a run has changed on its model."""
        if self._run is not None:
            self._run.ranks.end()

    def _run_of(self, model: nn.Module, inputs: Inputs) -> Run:
        """The run this micro-batch belongs to. At the first one its optimizer is there, and a batch to look at."""
        if self._run is None or self._run.state is not self._attached.trainer.state:
            self.end_run()
            self._run = Run(self._attached, model)
            if reasons := refusals(self._attached.trainer):
                self._run.is_refused = True
                self._run.refuse(reasons)
            try:
                find_layout(self._run, inputs)
            except IndivisibleError as error:  # which leaves what the ladder can do
                self._run.refuse([f"its micro-batches cannot be divided: {error}"])
        return self._run

    def _scale(self, num_items: torch.Tensor | int | None) -> float:
        """What `Trainer.training_step` multiplies the loss by: 1 where the loss is over the whole window already."""
        trainer = self._attached.trainer
        is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            is_scaled = trainer.model_accepts_loss_kwargs and num_items is not None
        return 1.0 if is_scaled else 1.0 / trainer.current_gradient_accumulation_steps


def _recovery(run: Run, micro: MicroBatch, **options: Any) -> Recovery:
    return (Recovery if run.ranks.window is None else Replay)(run, micro, **options)


def _cut_off(loss: torch.Tensor) -> None:
    """Free the graph behind a loss that somebody else holds."""
    if not loss._is_view():  # torch refuses it; what stays is found by `baseline.py`
        loss.detach_()


def _wrong_scale(micro: MicroBatch, loss: torch.Tensor) -> str:
    """Whether the loss that came to `backward` is another than was expected. Reads the device."""
    assert micro.value is not None
    expected, got = float(micro.value) * micro.scale, float(loss.detach())
    if math.isfinite(expected) and not math.isclose(expected, got, rel_tol=1e-2, abs_tol=1e-12):
        return f"the loss was {expected:.6g} as the Trainer scales it, and {got:.6g} came to backward"
    return ""
