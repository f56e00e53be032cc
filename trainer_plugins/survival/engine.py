"""Engine: replace methods of a Trainer, and finish the micro-batches that did not fit.

It replaces `trainer.compute_loss` and `trainer.accelerator.backward`. It leaves `training_step`
alone: TRL's trainers generate, slice and count in theirs, which must be entered once a micro-batch.
And it is not a callback: none is called inside a micro-batch.

Invariants, and where each is kept:

* The gradient of a micro-batch is the weighted sum of its pieces' gradients: `losses.py` says so,
  `certificate.py` measures it.
* No parameter receives the gradient of an example twice: `Piece.final`, from
  `GradientMark.changed`.
* A failed attempt leaves no tensor (`attempt.py`), no drawn number and no metric (`snapshot.py`).
* The loss is scaled between the two methods as the Trainer does it: `_scale`, and `handed.py`
  measures it.
* If everything fits, nothing is copied, computed or waited for.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from accelerate import Accelerator
from torch import nn

from trainer_plugins.survival.attempt.attempt import DidNotFit, attempt
from trainer_plugins.survival.evaluation.evaluation import Evaluation
from trainer_plugins.survival.exact.handed import Handed
from trainer_plugins.survival.exact.layouts import IndivisibleError, Inputs
from trainer_plugins.survival.exact.losses import Family, family_of
from trainer_plugins.survival.micro_batch import MicroBatch, Piece
from trainer_plugins.survival.refusals import refusals
from trainer_plugins.survival.replaced import Replaced
from trainer_plugins.survival.training.recoveries import RECOVERIES
from trainer_plugins.survival.training.recovery import Recovery
from trainer_plugins.survival.training.rehearsal import rehearse
from trainer_plugins.survival.training_run import Attached, TrainingRun, memo_of


class Engine:
    """Finishes the micro-batches of one Trainer that did not fit."""

    def __init__(self, attached: Attached) -> None:
        self.is_attached = True
        self._attached, self._replaced = attached, Replaced()
        self._accelerator: Accelerator | None = None
        self._run: TrainingRun | None = None
        self._current: MicroBatch | None = None
        self._evaluation = Evaluation(attached)

    def attach(self) -> None:
        """Replace the Trainer's methods."""
        self._replaced.put(self._attached.trainer, "compute_loss", self.compute_loss)
        self._replaced.put(
            self._attached.trainer, "prediction_step", self._evaluation.prediction_step
        )
        self._follow_accelerator()

    def detach(self) -> None:
        """Restore the methods, and what a run has changed on its model."""
        self.is_attached = False
        self._end_run()
        self._replaced.put_back()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Inputs,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Replace `trainer.compute_loss`.

        A micro-batch that was computed in pieces comes back as a loss without their graphs.
        """
        if self.is_attached and not model.training and not torch.is_grad_enabled():
            return self._evaluation.compute_loss(model, inputs, return_outputs, num_items_in_batch)
        is_training = model.training and torch.is_grad_enabled() and not return_outputs
        is_ours = self.is_attached and is_training and memo_of(self._attached.trainer).is_in_step
        run = self._run_of(model, inputs, num_items_in_batch) if is_ours else None
        if run is None or run.is_refused:
            return self._attached.compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        try:
            return self._training_loss(run, model, inputs, num_items_in_batch)
        except BaseException:  # an interruption too: what is computed next is not of this step
            run.memo.is_in_step = False
            raise

    def _training_loss(
        self,
        run: TrainingRun,
        model: nn.Module,
        inputs: Inputs,
        num_items_in_batch: torch.Tensor | int | None,
    ) -> torch.Tensor:
        run.gathers.begin()
        micro = MicroBatch(
            Piece(dict(inputs), 1), num_items_in_batch, self._scale(num_items_in_batch), run.start()
        )
        run.ranks.begin(micro)
        recovery = self._planned(run, micro)
        if recovery is None:
            loss = run.ranks.attempt(
                partial(run.compute_loss, model, inputs, num_items_in_batch), is_end=False
            )
            if not isinstance(loss, DidNotFit):
                if run.memo.pace is not None:
                    run.memo.pace.computed(micro.whole.num_cells, is_divided=False)
                if run.refuse_what_moves():
                    return loss
                # `detach_` in `backward` takes no view.
                loss = loss.clone() if loss._is_view() else loss
                micro.handed, self._current = Handed(loss, micro.scale), micro
                return loss
            recovery = _recovery(run, micro)
            why_not = recovery.wrong_so_far()
            recovery.failed(micro.whole, micro.start, loss, "forward", why_not=why_not)
        loss = _stand_in(recovery.finish())
        run.refuse_what_moves()
        micro.is_finished, self._current = True, micro
        micro.handed = Handed(loss, micro.scale)
        return loss

    def backward(self, loss: torch.Tensor, **options: object) -> None:
        """Replace `trainer.accelerator.backward`."""
        micro, self._current = self._current, None
        if micro is None or self._run is None:
            self._attached.backward(loss, **options)
            return
        try:
            self._training_backward(self._run, micro, loss, options)
        except BaseException:
            self._run.memo.is_in_step = False
            raise

    def _training_backward(
        self, run: TrainingRun, micro: MicroBatch, loss: torch.Tensor, options: dict[str, object]
    ) -> None:
        assert micro.handed is not None
        wrong = micro.handed.added(loss)
        if not wrong and (micro.is_finished or not run.is_scale_seen):
            measured = attempt(partial(micro.handed.measured, loss))
            if not isinstance(measured, DidNotFit):
                run.is_scale_seen, wrong = True, measured
            elif micro.is_finished:
                raise measured.as_error(
                    "there was no room to measure by what training_step multiplies the loss"
                )
        if wrong:
            run.is_refused = True
        if micro.is_finished:
            if wrong := wrong or _wrong_options(options, run.ranks.options):
                raise RuntimeError(
                    f"{wrong}, so the gradients of this step are wrong: detach survive_oom"
                )
        elif wrong:
            micro.handed.let_go()
            run.refuse([wrong])
            self._attached.backward(loss, **options)
        else:
            if run.is_step_own:  # costs two hooks; the step of a library is known
                micro.handed.watch(loss)
            micro.handed.let_go()
            # The caller's frames hold the loss, and with it the graph.
            work = partial(self._attached.backward, loss, **options)
            failure = run.ranks.attempt(work, release=partial(_cut_off, loss))
            if isinstance(failure, DidNotFit):
                recovery = _recovery(run, micro, **options)
                why_not = recovery.wrong_so_far()
                recovery.failed(micro.whole, micro.start, failure, "backward", why_not=why_not)
                recovery.finish()

    def _planned(self, run: TrainingRun, micro: MicroBatch) -> Recovery | None:
        """Plan how to divide a micro-batch that is larger than the limit; None: it stays whole."""
        if not RECOVERIES[run.ranks.recovery].may_divide(run, micro):
            return None
        recovery = _recovery(run, micro)
        return recovery if recovery.plan() > 1 else None

    def _follow_accelerator(self) -> None:
        """Replace `backward` of the Trainer's accelerator: each trial of a search has a new one."""
        accelerator = self._attached.trainer.accelerator
        if accelerator is not self._accelerator:
            if self._accelerator is not None:
                self._replaced.put_back(self._accelerator)
            self._accelerator, self._attached.backward = accelerator, accelerator.backward
            self._replaced.put(accelerator, "backward", self.backward)

    def _end_run(self) -> None:
        if self._run is not None:
            self._run.ranks.end()

    def _forget_run(self) -> None:
        """Let go of the model of a training that has ended: the next trial makes another one."""
        self._end_run()
        self._run = self._current = None
        self._evaluation.begin_run()

    def _run_of(
        self, model: nn.Module, inputs: Inputs, num_items: torch.Tensor | int | None
    ) -> TrainingRun:
        """Return the run this micro-batch belongs to.

        At its first micro-batch the run is judged again: the optimizer is there, and a batch to
        look at.
        """
        is_new = self._run is None or self._run.state is not self._attached.trainer.state
        reasons: list[str] = []
        if self._run is None or is_new:
            self._end_run()
            self._follow_accelerator()
            reasons = [*refusals(self._attached.trainer), *self._judged_anew()]
            self._run, self._current = TrainingRun(self._attached, model), None
            self._run.memo.when_over = WeakMethod(self._forget_run)
            roll_call = self._run.memo.roll_call
            if absent := self._run.ranks.absent(roll_call, is_met=self._have_met(num_items)):
                reasons.append(absent)
        self._run.ranks.prepare(partial(self._run.tiny_pass, inputs, num_items))
        if is_new:
            if reasons:
                self._run.is_refused = True
                self._run.ranks.end()
                self._run.refuse(reasons)
            try:
                self._run.layout_of(inputs)
            except IndivisibleError as error:  # the ladder can still help
                self._run.refuse([f"its micro-batches cannot be divided: {error}"])
            if self._attached.plan_first and not self._run.is_refused:
                rehearse(self._run, num_items, self._scale(num_items))
                self._run.refuse_what_moves()
            RECOVERIES[self._run.ranks.recovery].begin_run(self._run, inputs, num_items)
        if self._current is not None and not self._run.is_refused:
            why = "training_step does not call accelerator.backward once for each compute_loss"
            if self._current.is_finished:
                raise RuntimeError(
                    f"{why}, so the gradients of this step are wrong: detach survive_oom"
                )
            self._current, self._run.is_refused = None, True
            self._run.refuse([why])
        return self._run

    def _have_met(self, num_items: torch.Tensor | int | None) -> bool:
        """Tell whether the ranks have just gathered how many labels the window has."""
        is_gathered = getattr(self._attached.trainer.args, "average_tokens_across_devices", False)
        return bool(is_gathered) and num_items is not None

    def _judged_anew(self) -> list[str]:
        """Judge the loss once more: `model_init` makes a new model for each training."""
        family = family_of(
            self._attached.trainer, self._attached.compute_loss, is_vouched=self._attached.vouched
        )
        if not isinstance(family, Family):
            return [family]
        self._attached.family = family
        self._evaluation.begin_run()
        return []

    def _scale(self, num_items: torch.Tensor | int | None) -> float:
        """Return what `Trainer.training_step` multiplies the loss by.

        It is 1 if the loss is divided by the whole window already.
        """
        trainer = self._attached.trainer
        is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            # With an old transformers, trl says it so.
            accepts = trainer.model_accepts_loss_kwargs and num_items is not None
            is_scaled = accepts or trainer.compute_loss_func is not None
        return 1.0 if is_scaled else 1.0 / trainer.current_gradient_accumulation_steps


def _recovery(run: TrainingRun, micro: MicroBatch, **options: object) -> Recovery:
    return RECOVERIES[run.ranks.recovery](run, micro, **options)


def _stand_in(value: torch.Tensor) -> torch.Tensor:
    """Return a loss whose backward has been done, and which refuses another."""

    def refuse(_: torch.Tensor) -> None:
        raise RuntimeError(
            "backward was not called by trainer.accelerator: the gradients of this step are wrong: "
            "detach survive_oom"
        )

    leaf = value.clone().requires_grad_()
    leaf.register_hook(refuse)  # type: ignore[no-untyped-call]
    return leaf.clone()


def _cut_off(loss: torch.Tensor) -> None:
    """Free the graph behind a loss that somebody else holds."""
    if not loss._is_view():  # torch refuses a view; `baseline.py` finds what stays
        loss.detach_()


def _wrong_options(options: dict[str, object], expected: Mapping[str, object]) -> str:
    """Say whether `backward` got other options than the pieces had; empty if not."""
    return (
        ""
        if options == expected
        else f"backward got the options {options}, and the pieces had {dict(expected)}"
    )
