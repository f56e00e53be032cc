"""Engine: replaces methods of a Trainer, and finishes the micro-batches that did not fit.

It replaces `trainer.compute_loss` and `trainer.accelerator.backward`. It leaves `training_step`
alone, in which TRL's trainers generate, slice and count. Its invariants, and where each is kept:

* The gradient of a micro-batch is the weighted sum of its pieces' gradients: `losses.py` lists
  the losses for which that holds, and `certificate.py` measures it.
* No parameter receives the gradient of an example twice: `Piece.final`, from
  `GradientMark.find_changed`.
* A failed attempt leaves no tensor (`attempt.py`), no drawn number and no metric (`state.py`).
* The loss is scaled between the two methods as the Trainer does it: `_scale`, and `Handed`.
* If everything fits, nothing is copied, computed or waited for.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from trainer_plugins.hf_trainer import HfAccelerator
from trainer_plugins.patched import Patches
from trainer_plugins.survival.attempt.attempt import DidNotFit, attempt, collect_once
from trainer_plugins.survival.completions import DividedCompletions
from trainer_plugins.survival.evaluation import Evaluation
from trainer_plugins.survival.exact.finality import hooks_of_gradients
from trainer_plugins.survival.exact.losses import Family, family_of
from trainer_plugins.survival.exact.shares import IndivisibleError, Inputs, NumItems
from trainer_plugins.survival.memo import memo_of
from trainer_plugins.survival.micro_batch import Handed, MicroBatch, Piece
from trainer_plugins.survival.ranks.alone import HowToRecover
from trainer_plugins.survival.refusals import refusals
from trainer_plugins.survival.training.planned_pieces import PlannedPieces, Replay
from trainer_plugins.survival.training.recovery import Recovery
from trainer_plugins.survival.training.rehearsal import divide_from_the_start, rehearse
from trainer_plugins.survival.training_run import Attached, TrainingRun

_RECOVERIES: dict[HowToRecover, type[Recovery]] = {
    HowToRecover.ALONE: Recovery,
    HowToRecover.PLANNED: PlannedPieces,
    HowToRecover.AGAIN: Replay,
}

_WRONG_STEP = "so the gradients of this step are wrong: detach survive_oom"


class Engine:
    """Finishes the micro-batches of one Trainer that did not fit."""

    def __init__(self, attached: Attached) -> None:
        self.is_attached = True
        self._attached = attached
        self._begin_unpatched()
        self._evaluation = Evaluation(attached)
        self._completions = DividedCompletions(attached)

    def attach(self) -> None:
        trainer = self._attached.trainer
        self._methods.set(trainer, "compute_loss", self.compute_loss)
        self._methods.set(trainer, "prediction_step", self._evaluation.prediction_step)
        for name, divided in self._completions.methods():
            self._methods.set(trainer, name, divided)
        self._follow_accelerator()
        memo_of(trainer).listener = self

    def __getstate__(self) -> dict[str, object]:
        """Return the state for a copied Trainer's engine; the copy shares the accelerator."""
        kept = ("is_attached", "_attached", "_evaluation", "_completions")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, kept: dict[str, object]) -> None:
        self._begin_unpatched()
        vars(self).update(kept)

    def _begin_unpatched(self) -> None:
        self._methods, self._backward = Patches(keeps_later=True), Patches(keeps_later=True)
        self._accelerator: HfAccelerator | None = None
        self._judged: object = None  # the `state` of the last training: each has its own
        self._run: TrainingRun | None = None  # none before it begins, or if it cannot be helped
        self._current: MicroBatch | None = None

    def detach(self) -> None:
        self.is_attached = False
        self._end_run()
        self._backward.close()
        self._methods.close()

    def step_begins(self) -> None:
        if self.is_attached:
            self._begin_run_if_new(self._attached.trainer.model_wrapped)

    def training_ends(self) -> None:
        """Release the model when a training has ended: the next trial makes another one."""
        self._end_run()
        self._judged = None
        self._evaluation.begin_run()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Inputs,
        return_outputs: bool = False,
        num_items_in_batch: NumItems = None,
    ) -> Any:
        """Replace `trainer.compute_loss`; a loss computed in pieces has no graph."""
        # A collator may return another mapping, such as BatchEncoding, with attributes to read.
        self._attached.batch_type = type(inputs)
        is_evaluation = self.is_attached and not model.training and not torch.is_grad_enabled()
        is_evaluation &= isinstance(inputs, Mapping)
        if is_evaluation and not self._attached.kind.forward_is_shared:
            return self._evaluation.compute_loss(model, inputs, return_outputs, num_items_in_batch)
        is_training = model.training and torch.is_grad_enabled() and not return_outputs
        memo = memo_of(self._attached.trainer)
        is_ours = self.is_attached and is_training and memo.is_in_step
        run = self._run_of(model, inputs, num_items_in_batch) if is_ours else None
        if run is None or run.is_refused:
            return self._attached.compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        try:
            return self._training_loss(run, model, inputs, num_items_in_batch)
        except BaseException:  # also Ctrl-C: later computations are not part of this step
            run.memo.is_in_step = False
            raise

    def _training_loss(
        self, run: TrainingRun, model: nn.Module, inputs: Inputs, num_items: NumItems
    ) -> torch.Tensor:
        run.gathers.begin()
        whole = Piece(dict(inputs), 1)
        micro = MicroBatch(whole, num_items, self._scale(num_items), run.start())
        run.ranks.begin(micro)
        limit, plans_together = run.memo.limit, run.ranks.forward_is_shared
        may_divide = limit < math.inf and (plans_together or whole.num_cells > limit)
        recovery = _recovery(run, micro) if may_divide else None
        if recovery is None or recovery.plan() == 1:
            compute = partial(run.compute_loss, model, inputs, num_items)
            outcome = run.ranks.attempt(compute, is_end=False)
            if not isinstance(outcome, DidNotFit):
                return self._hand_out(run, micro, outcome)
            recovery = _recovery(run, micro)
            with collect_once():
                recovery.recover(whole, micro.start, outcome, "forward")
                total = recovery.finish()
        else:
            total = recovery.finish()
        loss = _stand_in(total)
        run.refuse_what_moves()
        micro.is_finished, self._current = True, micro
        micro.handed = Handed(loss, micro.scale)
        return loss

    def _hand_out(self, run: TrainingRun, micro: MicroBatch, loss: torch.Tensor) -> torch.Tensor:
        if run.memo.pace is not None:
            run.memo.pace.note_computed(micro.whole.num_cells, is_divided=False)
        if run.refuse_what_moves():
            return loss
        # `detach_` in `backward` rejects views.
        loss = loss.clone() if loss._is_view() else loss
        micro.handed, self._current = Handed(loss, micro.scale), micro
        return loss

    def backward(self, loss: torch.Tensor, **options: object) -> None:
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
        found: str | DidNotFit = micro.handed.find_added(loss)
        if not found and (micro.is_finished or not run.is_scale_seen):
            found = attempt(partial(micro.handed.find_scaled, loss))
            run.is_scale_seen |= not isinstance(found, DidNotFit)
        changed = "" if isinstance(found, DidNotFit) else found
        run.is_refused |= bool(changed)
        if micro.is_finished:
            _check_finished(found, options, run.ranks.options)
            return
        if changed:
            micro.handed.drop_graph()
            self._attached.refuse([changed])
            self._attached.backward(loss, **options)
            return
        if run.is_step_own:  # costs two hooks; a library's step is known
            micro.handed.watch(loss)
        micro.handed.drop_graph()

        def compute() -> None:
            try:
                self._attached.backward(loss, **options)
            except (RuntimeError, MemoryError):
                # The caller's frames hold the loss, and with it the graph. torch rejects a view;
                # `judge_left_over` reports memory that stays.
                if not loss._is_view():
                    loss.detach_()
                raise

        failure = run.ranks.attempt(compute)
        if isinstance(failure, DidNotFit):
            recovery = _recovery(run, micro, **options)
            with collect_once():
                recovery.recover(micro.whole, micro.start, failure, "backward")
                recovery.finish()

    def _follow_accelerator(self) -> None:
        """Replace `backward` of the Trainer's accelerator: each trial of a search has a new one."""
        accelerator = self._attached.trainer.accelerator
        if accelerator is not self._accelerator:
            self._backward.close()
            self._backward = Patches(keeps_later=True)  # patches keep their target alive
            self._accelerator, self._attached.backward = accelerator, accelerator.backward
            self._backward.set(accelerator, "backward", self.backward)

    def _end_run(self) -> None:
        if self._run is not None:
            self._run.ranks.end()
        self._run = self._current = None

    def _begin_run_if_new(self, model: nn.Module) -> None:
        attached, trainer, run = self._attached, self._attached.trainer, self._run
        is_known_model = run is None or run.has_met_batch or run.wrapped is model
        if self._judged is trainer.state and is_known_model:
            return
        self._end_run()
        self._follow_accelerator()
        self._evaluation.begin_run()
        self._judged, memo_of(trainer).listener = trainer.state, self
        family = family_of(trainer, attached.compute_loss, is_vouched=attached.is_vouched)
        reasons = refusals(trainer, family)
        if isinstance(family, Family):
            attached.family = family
        if reasons:
            attached.refuse(reasons)
        else:
            self._run = TrainingRun(attached, model)

    def _run_of(self, model: nn.Module, inputs: Inputs, num_items: NumItems) -> TrainingRun | None:
        self._begin_run_if_new(model)
        run = self._run
        if run is None or run.is_refused:
            return run
        run.ranks.tiny = partial(run.tiny_pass, inputs, num_items)
        if not run.has_met_batch:
            run.has_met_batch = True
            self._meet_first_batch(run, inputs, num_items)
        self._check_call_order(run)
        return run

    def _meet_first_batch(self, run: TrainingRun, inputs: Inputs, num_items: NumItems) -> None:
        trainer = self._attached.trainer
        # The ranks are in contact if they just gathered the number of labels in the window.
        is_met = trainer.args.average_tokens_across_devices and num_items is not None
        # Callbacks that ran after ours at the start of the step may have set hooks.
        reasons = [*hooks_of_gradients(trainer.model), *run.ranks.refusals(trainer)]
        if absent := run.ranks.absent(run.memo.roll_call, is_met=is_met):
            reasons.append(absent)
        if not isinstance(inputs, Mapping):
            reasons.append(
                f"its micro-batches are no dictionaries: each is a {type(inputs).__name__}"
            )
        if reasons:
            run.is_refused = True
            run.ranks.end()
            self._attached.refuse(reasons)
            return
        try:
            run.layout_of(inputs)
        except IndivisibleError as error:  # the ladder can still help
            self._attached.refuse([f"its micro-batches cannot be divided: {error}"])
        if self._attached.rows_at_once:
            divide_from_the_start(run, inputs)
        elif self._attached.plan_first:
            rehearse(run, inputs, num_items, self._scale(num_items))
            run.refuse_what_moves()
        _RECOVERIES[run.ranks.recovery].begin_run(run, inputs, num_items)

    def _check_call_order(self, run: TrainingRun) -> None:
        if self._current is None or run.is_refused:
            return
        why = "training_step does not call accelerator.backward once for each compute_loss"
        if self._current.is_finished:
            raise RuntimeError(f"{why}, {_WRONG_STEP}")
        self._current, run.is_refused = None, True
        self._attached.refuse([why])

    def _scale(self, num_items: NumItems) -> float:
        """Return the Trainer's factor for the loss: 1 if the window divides it already."""
        trainer = self._attached.trainer
        is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            # With an old transformers, TRL sets its marker here.
            accepts = trainer.model_accepts_loss_kwargs and num_items is not None
            is_scaled = accepts or trainer.compute_loss_func is not None
        return 1.0 if is_scaled else 1.0 / trainer.current_gradient_accumulation_steps


def _recovery(run: TrainingRun, micro: MicroBatch, **options: object) -> Recovery:
    return _RECOVERIES[run.ranks.recovery](run, micro, **options)


def _check_finished(
    found: str | DidNotFit, options: dict[str, object], expected: Mapping[str, object]
) -> None:
    if isinstance(found, DidNotFit):
        raise found.make_error("no memory was left to measure how training_step scales the loss")
    if found:
        raise RuntimeError(f"{found}, {_WRONG_STEP}")
    if options != expected:
        raise RuntimeError(
            f"backward got the options {options}, and the pieces had {dict(expected)}, "
            f"{_WRONG_STEP}"
        )


def _stand_in(value: torch.Tensor) -> torch.Tensor:

    def refuse(_: torch.Tensor) -> None:
        raise RuntimeError(f"backward was not called by trainer.accelerator, {_WRONG_STEP}")

    leaf = value.clone().requires_grad_()
    leaf.register_hook(refuse)  # type: ignore[no-untyped-call]
    return leaf.clone()
