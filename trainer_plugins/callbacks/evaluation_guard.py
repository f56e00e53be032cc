"""EvaluationGuard: what an evaluation keeps until its end fits, or is said at its first batch."""

import logging
from collections.abc import Iterator, Sized
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch
from transformers import Trainer

from trainer_plugins.callbacks._around import GuardCallback, put_around
from trainer_plugins.devices import Device, HostDevice
from trainer_plugins.finding import Finding
from trainer_plugins.record.timeline import Remark, Timeline
from trainer_plugins.upkeep.agreement import agreement_within, has_peers
from trainer_plugins.upkeep.kept_outputs import (
    judge_kept,
    kept_bytes,
    metrics_of_argmax,
    why_not_argmax,
)
from trainer_plugins.upkeep.roll_call import RollCall

logger = logging.getLogger(__name__)

_PLACES = ("cpu", "argmax")

_WAIT_SECONDS = 60.0
"""How long another rank may be on its way to the first batch."""


class EvaluationGuard(GuardCallback):
    """Forecasts at the first batch what an evaluation keeps until its end, and keeps less if asked.

    With a `compute_metrics`, and in every `predict`, the Trainer keeps the outputs of all batches
    on the card, and holds them twice while it joins them. The first batch shows what that will
    take; a finding says so if it is more than half of what is free. If you name `logits_to`, the
    guard then acts, from the first batch on:

    * `"cpu"` moves what is kept to main memory after each batch, as `--eval_accumulation_steps 1`
      does. Metrics are the same.
    * `"argmax"` keeps the place of the largest logit of each row. Your `compute_metrics` gets a
      stand-in that answers `argmax` over the last axis, and nothing else. On the first batch it is
      called with all logits and with the stand-in: unless both give the same, or in `predict`, the
      logits go to main memory instead, and a warning says why.

    What it changes on the Trainer is put back at the end of each evaluation, also if that raises.

    Cost: a reading at the first batch, and at each that keeps more than those before. `"cpu"`: main
    memory, and a copy of what is kept at each batch. `"argmax"`: your metrics of one batch, twice
    in each evaluation that does not fit; with several ranks two votes. The first guard of a process
    wraps one method of `transformers.Trainer`.
    """

    def __init__(
        self,
        logits_to: Literal["cpu", "argmax"] | None = None,
        device: Device | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        if logits_to is not None and logits_to not in _PLACES:
            raise ValueError(f"logits_to is cpu, argmax or None, got {logits_to!r}")
        super().__init__(device, timeline)
        self.logits_to = logits_to
        put_around("evaluation_loop", EvaluationGuard, EvaluationGuard.around_loop)

    def at_rest(self) -> None:
        super().at_rest()
        self._said = 0
        """The highest severity that was said in this run."""

    @contextmanager
    def around_loop(
        self,
        trainer: Trainer,
        dataloader: object,
        description: str,
        *args: object,
        **kwargs: object,
    ) -> Iterator[None]:
        """Watch one evaluation or prediction of a Trainer."""
        device = None if self.is_second(trainer.state) else self.device_for(trainer.args)
        if device is None:
            yield
            return
        # The Trainer passes each batch's outputs here, before ranks exchange them.
        before = trainer.preprocess_logits_for_metrics, trainer.compute_metrics
        num_steps = trainer.args.eval_accumulation_steps
        watch = _Watch(self, trainer, device, dataloader, description == "Evaluation")
        trainer.preprocess_logits_for_metrics = watch.see
        try:
            yield
        finally:
            trainer.preprocess_logits_for_metrics, trainer.compute_metrics = before
            trainer.args.eval_accumulation_steps = num_steps

    def say(self, finding: Finding, trainer: Trainer) -> None:
        """Report a finding, once a run unless it gets worse."""
        if finding.severity > self._said:
            self._said = finding.severity
            step = trainer.state.global_step
            self.timeline_for(trainer.args).add(Remark(step=step, finding=finding))
            logger.log(finding.severity, "step %d: %s", step, finding)


class _Watch:
    """Sees the outputs of each batch of one evaluation."""

    def __init__(
        self,
        guard: EvaluationGuard,
        trainer: Trainer,
        device: Device,
        dataloader: object,
        is_evaluation: bool,
    ) -> None:
        self._guard, self._trainer, self._device = guard, trainer, device
        self._theirs = trainer.preprocess_logits_for_metrics
        self._is_evaluation = is_evaluation
        self._num_batches = 0
        with suppress(TypeError):  # a loader of a data set that does not know its length
            self._num_batches = len(dataloader) if isinstance(dataloader, Sized) else 0
        self._num_seen = self._largest_bytes = 0
        self._takes_argmax = False

    def see(self, outputs: Any, labels: Any) -> Any:
        """Return what is to be kept of a batch."""
        if self._theirs is not None:
            outputs = self._theirs(outputs, labels)
        with self._guard.harmless():
            self._num_seen += 1
            is_kept = not (self._is_evaluation and self._trainer.args.batch_eval_metrics)
            if is_kept and not self._takes_argmax:
                self._judge(outputs, labels)
        return outputs.argmax(-1) if self._takes_argmax else outputs

    def _judge(self, outputs: object, labels: object) -> None:
        args = self._trainer.args
        batch_bytes = kept_bytes(outputs)
        if batch_bytes <= self._largest_bytes and self._num_batches:
            return
        self._largest_bytes = max(self._largest_bytes, batch_bytes)
        finding = None
        try:
            finding = self._forecast(outputs)
        finally:  # a reading that fails must not keep the other ranks waiting
            if self._num_seen == 1 and self._guard.logits_to == "argmax":
                self._takes_argmax = self._may_take_argmax(outputs, labels, finding is not None)
        if finding is None or self._takes_argmax:
            return
        if self._guard.logits_to is not None and self._are_on_card():
            args.eval_accumulation_steps = 1
            logger.info("%s; they go to main memory after each batch", finding.summary)
            finding = self._forecast(outputs)
        if finding is not None:
            self._guard.say(finding, self._trainer)

    def _are_on_card(self) -> bool:
        """Return whether what is kept stays on the card until the end."""
        return self._device.name != "cpu" and self._trainer.args.eval_accumulation_steps is None

    def _forecast(self, outputs: object) -> Finding | None:
        args, is_on_card = self._trainer.args, self._are_on_card()
        batch_bytes = kept_bytes(outputs, as_arrays=not is_on_card) * args.world_size
        reading = (self._device if is_on_card else HostDevice()).read()
        # What is free, and what is part of the forecast already.
        free_bytes = reading.free_bytes + (self._num_seen - 1) * batch_bytes
        if is_on_card:
            free_bytes += reading.cached_bytes + kept_bytes(outputs)
        return judge_kept(
            batch_bytes,
            max(self._num_batches, self._num_seen + 1),
            args.eval_do_concat_batches,
            free_bytes,
            reading.device if is_on_card else "main memory",
        )

    def _may_take_argmax(self, outputs: object, labels: object, is_needed: bool) -> bool:
        """Return whether the argmax is kept, on all ranks or on none."""
        args, metrics = self._trainer.args, self._trainer.compute_metrics
        roll = RollCall("EvaluationGuard")
        roll.sign()
        missing = roll.missing(_WAIT_SECONDS) if has_peers() else ""
        is_needed = is_needed if missing else self._does_any_rank(is_needed)
        if not is_needed:
            return False
        if not self._is_evaluation or metrics is None:
            why = "predictions are returned as they are"
        elif self._theirs is not None or args.include_for_metrics:
            why = "the Trainer has a preprocess_logits_for_metrics, or include_for_metrics"
        elif not args.eval_do_concat_batches:
            why = "batches are not joined (eval_do_concat_batches)"
        else:
            why = why_not_argmax(metrics, outputs, labels)
        if missing or self._does_any_rank(why != ""):
            logger.warning(
                "the logits are kept, and not their argmax: %s",
                missing or why or "another rank found why; read its log",
            )
            return False
        assert metrics is not None
        assert isinstance(outputs, torch.Tensor)
        self._trainer.compute_metrics = metrics_of_argmax(metrics, outputs.shape[-1])
        return True

    def _does_any_rank(self, answer: bool) -> bool:
        return agreement_within(self._trainer.args.ddp_timeout).highest(int(answer)) != 0
