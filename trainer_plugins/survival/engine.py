"""The engine: stands before `trainer.compute_loss` and `trainer.accelerator.backward`, and finishes what did not fit.

Invariants, and where each is kept:

* The gradient of a micro-batch is the weighted sum of its pieces': `losses.py` says so,
  `certificate.py` measures it.
* No parameter receives the gradient of an example twice: `Piece.final`, from
  `GradientMark.changed`.
* A failed attempt leaves no tensor (`attempt.py`), no drawn number and no metric (`snapshot.py`).
* The loss is scaled between the two as the Trainer does it: `_scale`, and `handed.py` measures it.
* Where everything fits, nothing is copied, computed or waited for.

Not `training_step`: TRL's trainers generate, slice and count in theirs, which must be entered once
a micro-batch. And not a callback: none is called inside a micro-batch.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from trainer_plugins.survival.attempt.attempt import DidNotFit, attempt
from trainer_plugins.survival.evaluation.evaluation import Evaluation
from trainer_plugins.survival.exact.handed import Handed
from trainer_plugins.survival.exact.layouts import IndivisibleError, Inputs
from trainer_plugins.survival.exact.losses import Family, family_of
from trainer_plugins.survival.limit.pace import Pace
from trainer_plugins.survival.micro_batch import MicroBatch, Piece
from trainer_plugins.survival.refusals import refusals
from trainer_plugins.survival.replaced import Replaced
from trainer_plugins.survival.run import Attached, Run, memo_of
from trainer_plugins.survival.training.recovery import Recovery
from trainer_plugins.survival.training.rehearsal import rehearse
from trainer_plugins.survival.training.replay import Replay, tiny_pass
from trainer_plugins.survival.words import not_attached


class Engine:
    """Of one Trainer."""

    def __init__(self, attached: Attached) -> None:
        self.is_attached = True
        self._attached, self._replaced = attached, Replaced()
        self._accelerator: Any = None
        self._run: Run | None = None
        self._current: MicroBatch | None = None
        self._evaluation = Evaluation(attached)

    def attach(self) -> None:
        """Stand before the Trainer's methods."""
        self._replaced.put(self._attached.trainer, "compute_loss", self.compute_loss)
        self._replaced.put(
            self._attached.trainer, "prediction_step", self._evaluation.prediction_step
        )
        self._follow_accelerator()

    def detach(self) -> None:
        """Put back the methods, and what a run has changed on its model."""
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
        """In the place of `trainer.compute_loss`.

        What was done in pieces comes back as a loss without their graphs.
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
        except (
            BaseException
        ):  # an interruption too: the step is over, and what is computed next is none of it
            run.memo.is_in_step = False
            raise

    def _training_loss(
        self,
        run: Run,
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
                loss = (
                    loss.clone() if loss._is_view() else loss
                )  # `detach_` in `backward` takes no view
                micro.handed, self._current = Handed(loss, micro.scale), micro
                return loss
            recovery = _recovery(run, micro)
            recovery.failed(micro.whole, micro.start, loss, "forward", why_not=_wrong_so_far(run))
        loss = _stand_in(recovery.finish())
        micro.is_finished, self._current = True, micro
        micro.handed = Handed(loss, micro.scale)
        return loss

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """In the place of `trainer.accelerator.backward`."""
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
        self, run: Run, micro: MicroBatch, loss: torch.Tensor, options: dict[str, Any]
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
            if run.is_step_own:  # two hooks and the time they take; the step of a library is known
                micro.handed.watch(loss)
            micro.handed.let_go()
            # The caller's frames hold the loss, and with it the graph.
            work = partial(self._attached.backward, loss, **options)
            failure = run.ranks.attempt(work, release=partial(_cut_off, loss))
            if isinstance(failure, DidNotFit):
                recovery = _recovery(run, micro, **options)
                why_not = _wrong_so_far(run, micro)
                recovery.failed(micro.whole, micro.start, failure, "backward", why_not=why_not)
                recovery.finish()

    def _planned(self, run: Run, micro: MicroBatch) -> Recovery | None:
        """How to divide a micro-batch that is larger than the limit, here or on a rank that keeps step with this."""
        if math.isinf(run.memo.limit) or not (
            run.ranks.in_step or micro.whole.num_cells > run.memo.limit
        ):
            return None
        recovery = _recovery(run, micro)
        return recovery if recovery.plan() > 1 else None

    def _follow_accelerator(self) -> None:
        """Stand before the Trainer's accelerator: transformers makes a new one for each trial of a search."""
        accelerator = self._attached.trainer.accelerator
        if accelerator is not self._accelerator:
            if self._accelerator is not None:
                self._replaced.put_back(self._accelerator)
            self._accelerator, self._attached.backward = accelerator, accelerator.backward
            self._replaced.put(accelerator, "backward", self.backward)

    def _end_run(self) -> None:
        if self._run is not None:
            self._run.ranks.end()

    def _run_of(
        self, model: nn.Module, inputs: Inputs, num_items: torch.Tensor | int | None
    ) -> Run:
        """The run this micro-batch belongs to.

        At the first one its optimizer is there, and a batch to look at.
        """
        is_new = self._run is None or self._run.state is not self._attached.trainer.state
        reasons: list[str] = []
        if self._run is None or is_new:
            self._end_run()
            self._follow_accelerator()
            reasons = [*refusals(self._attached.trainer), *self._judged_anew()]
            self._run, self._current = Run(self._attached, model), None
        self._run.ranks.tiny = partial(tiny_pass, self._run, inputs, num_items)
        if is_new:
            if reasons:
                self._run.is_refused = True
                self._run.refuse(reasons)
            try:
                self._run.layout_of(inputs)
            except IndivisibleError as error:  # which leaves what the ladder can do
                self._run.refuse([f"its micro-batches cannot be divided: {error}"])
            if self._attached.plan_first and not self._run.is_refused:
                rehearse(self._run, num_items, self._scale(num_items))
                self._run.refuse_what_moves()
            self._run.memo.pace = None if self._run.ranks.in_step else self._pace(self._run)
            if self._run.ranks.in_step and not self._run.is_refused:
                self._agree(self._run, inputs, num_items)
        if self._current is not None and not self._run.is_refused:
            why = "training_step does not call accelerator.backward once for each compute_loss"
            if self._current.is_finished:
                raise RuntimeError(
                    f"{why}, so the gradients of this step are wrong: detach survive_oom"
                )
            self._current, self._run.is_refused = None, True
            self._run.refuse([why])
        return self._run

    def _judged_anew(self) -> list[str]:
        """Why the loss cannot be divided, where there is another model by now: `model_init` makes one a training."""
        family = family_of(
            self._attached.trainer, self._attached.compute_loss, is_vouched=self._attached.vouched
        )
        if not isinstance(family, Family):
            return [family]
        self._attached.family = family
        self._evaluation.begin_run()
        return []

    def _pace(self, run: Run) -> Pace:
        """Of a limit of this rank's own.

        One that a rehearsal found does not grow, unless it was lowered since.
        """
        ceiling = run.memo.limit if run.memo.is_rehearsed else math.inf
        reading = run.card.read() if run.card else None
        return Pace(
            too_much=ceiling,
            ceiling=ceiling,
            num_retries=reading.num_alloc_retries if reading else 0,
        )

    def _agree(self, run: Run, inputs: Inputs, num_items: torch.Tensor | int | None) -> None:
        """One limit for all ranks; and where there is one, measure together by which weights pieces add up."""
        run.memo.limit = run.ranks.agreed(run.memo.limit)
        if math.isinf(run.memo.limit):
            return
        recovery, why = (
            _recovery(run, MicroBatch(Piece(dict(inputs), 1), num_items, 1.0, run.start())),
            "",
        )
        try:
            recovery.measure()
        except IndivisibleError as error:
            why = str(error)
        if run.ranks.highest(int(bool(why))):
            run.memo.limit = math.inf
            run.say(
                not_attached(
                    [f"micro-batches cannot be divided: {why or 'those of another rank cannot'}"]
                )
            )

    def _scale(self, num_items: torch.Tensor | int | None) -> float:
        """What `Trainer.training_step` multiplies the loss by: 1 where the loss is over the whole window already."""
        trainer = self._attached.trainer
        is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            accepts = trainer.model_accepts_loss_kwargs and num_items is not None
            is_scaled = (
                accepts or trainer.compute_loss_func is not None
            )  # how trl says it where transformers is old
        return 1.0 if is_scaled else 1.0 / trainer.current_gradient_accumulation_steps


def _recovery(run: Run, micro: MicroBatch, **options: Any) -> Recovery:
    return (Recovery if run.ranks.window is None else Replay)(run, micro, **options)


def _stand_in(value: torch.Tensor) -> torch.Tensor:
    """A loss whose backward has been done."""

    def refuse(_: torch.Tensor) -> None:
        raise RuntimeError(
            "backward was not called by trainer.accelerator: the gradients of this step are wrong: detach survive_oom"
        )

    leaf = value.clone().requires_grad_()
    leaf.register_hook(refuse)  # type: ignore[no-untyped-call]
    return leaf.clone()


def _wrong_so_far(run: Run, *micros: MicroBatch) -> str:
    """Whether one of these micro-batches, or of those that are computed again, was scaled otherwise than pieces are."""
    handed = (micro.handed for micro in (*(run.ranks.window or ()), *micros))
    return next((wrong for one in handed if one is not None and (wrong := one.seen())), "")


def _cut_off(loss: torch.Tensor) -> None:
    """Free the graph behind a loss that somebody else holds."""
    if not loss._is_view():  # torch refuses it; what stays is found by `baseline.py`
        loss.detach_()


def _wrong_options(options: dict[str, Any], expected: Mapping[str, Any]) -> str:
    """Whether `backward` got other options than the pieces had."""
    return (
        ""
        if options == expected
        else f"backward got the options {options}, and the pieces had {dict(expected)}"
    )
