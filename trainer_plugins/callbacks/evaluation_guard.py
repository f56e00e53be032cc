"""EvaluationGuard: forecasts the memory of an evaluation from its first batch."""

import logging
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

from trainer_plugins.callbacks._run import RunCallback, put_around
from trainer_plugins.devices import Device, HostDevice
from trainer_plugins.finding import Finding
from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.record.timeline import Timeline
from trainer_plugins.upkeep.agreement import RollCall, any_rank
from trainer_plugins.upkeep.kept_outputs import (
    count_kept_bytes,
    explain_no_argmax,
    judge_kept,
    metrics_of_argmax,
)

logger = logging.getLogger(__name__)


class EvaluationGuard(RunCallback):
    """Forecasts an evaluation's peak memory at its first batch, and can reduce it.

    >>> callback = EvaluationGuard(logits_to="cpu")  # Trainer(..., callbacks=[callback])

    With a `compute_metrics`, and in every `predict`, the Trainer keeps the outputs of all batches
    on the GPU, and needs them twice while it concatenates them. From the first batch the guard
    forecasts the total. It reports a finding if that is more than half of the free memory. With
    `logits_to` it then acts, from the first batch on:

    * `"cpu"` moves the outputs to main memory after each batch, as `--eval_accumulation_steps 1`
      does. Your metrics stay the same.
    * `"argmax"` keeps the index of the largest logit of each row. Your `compute_metrics` gets a
      stand-in that answers `argmax` over the last axis, and nothing else. On the first batch the
      guard calls it with all logits and with the stand-in. If the results differ, and always in
      `predict`, the logits go to main memory instead, and a warning says why.

    The guard restores the Trainer at the end of each evaluation, even if that raises.

    Cost: a reading at the first batch, and at each later batch that is larger than all before.
    `"cpu"`: main memory, and a copy of each batch's outputs. `"argmax"`: your metrics on one batch,
    twice in each evaluation that does not fit, and two votes if there are several ranks. The first
    guard in a process wraps one method of `transformers.Trainer`.
    """

    def __init__(
        self,
        logits_to: Literal["cpu", "argmax"] | None = None,
        device: Device | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        if logits_to not in ("cpu", "argmax", None):
            raise ValueError(f"logits_to is cpu, argmax or None, got {logits_to!r}")
        super().__init__(device, timeline)
        self.logits_to = logits_to
        put_around("evaluation_loop", EvaluationGuard, EvaluationGuard.around_loop)

    def reset(self) -> None:
        super().reset()
        self.reported = 0  # highest severity reported in this run

    @contextmanager
    def around_loop(
        self, trainer: HfTrainer, dataloader: Sized, description: str, *_: object, **__: object
    ) -> Iterator[None]:
        device = self.device_if_first(trainer.args, trainer.state)
        if device is None:
            yield
            return
        # The Trainer calls this with each batch's outputs, before ranks exchange them.
        before = trainer.preprocess_logits_for_metrics, trainer.compute_metrics
        num_steps = trainer.args.eval_accumulation_steps
        num_batches = 0
        with suppress(TypeError):  # the data set may have no length
            num_batches = len(dataloader)
        is_evaluation = description == "Evaluation"
        watch = _Watch(self, trainer, device, num_batches, is_evaluation, before[0])
        trainer.preprocess_logits_for_metrics = watch.see
        try:
            yield
        finally:
            trainer.preprocess_logits_for_metrics, trainer.compute_metrics = before
            trainer.args.eval_accumulation_steps = num_steps


@dataclass
class _Watch:
    guard: EvaluationGuard
    trainer: HfTrainer
    device: Device
    num_batches: int  # 0 if the data set has no length
    is_evaluation: bool
    users_preprocess: Callable[[Any, Any], Any] | None
    num_seen: int = 0
    largest_bytes: int = 0
    takes_argmax: bool = False

    def see(self, outputs: Any, labels: Any) -> Any:
        if self.users_preprocess is not None:
            outputs = self.users_preprocess(outputs, labels)
        with self.guard.harmless():
            self.num_seen += 1
            is_kept = not (self.is_evaluation and self.trainer.args.batch_eval_metrics)
            if is_kept and not self.takes_argmax:
                self._judge(outputs, labels)
        return outputs.argmax(-1) if self.takes_argmax else outputs

    def _judge(self, outputs: object, labels: object) -> None:
        batch_bytes = count_kept_bytes(outputs)
        if batch_bytes <= self.largest_bytes and self.num_batches:
            return
        self.largest_bytes = max(self.largest_bytes, batch_bytes)
        finding = None
        try:
            finding = self._forecast(outputs)
        finally:  # a failed reading must not make the other ranks wait
            if self.num_seen == 1 and self.guard.logits_to == "argmax":
                self.takes_argmax = self._may_take_argmax(outputs, labels, finding is not None)
        if finding is None or self.takes_argmax:
            return
        if self.guard.logits_to is not None and self._are_on_card():
            self.trainer.args.eval_accumulation_steps = 1
            logger.info("%s; they go to main memory after each batch", finding.summary)
            finding = self._forecast(outputs)
        if finding is not None and finding.severity > self.guard.reported:
            self.guard.reported = finding.severity
            self.guard.remark(self.trainer.args, self.trainer.state.global_step, finding)

    def _are_on_card(self) -> bool:
        return self.device.name != "cpu" and self.trainer.args.eval_accumulation_steps is None

    def _forecast(self, outputs: object) -> Finding | None:
        args, is_on_card = self.trainer.args, self._are_on_card()
        batch_bytes = count_kept_bytes(outputs, as_arrays=not is_on_card) * args.world_size
        reading = (self.device if is_on_card else HostDevice()).read()
        # Free memory, plus the outputs kept so far, which the forecast includes.
        free_bytes = reading.free_bytes + (self.num_seen - 1) * batch_bytes
        if is_on_card:
            free_bytes += reading.cached_bytes + count_kept_bytes(outputs)
        return judge_kept(
            batch_bytes,
            max(self.num_batches, self.num_seen + 1),
            args.eval_do_concat_batches,
            free_bytes,
            reading.device if is_on_card else "main memory",
        )

    def _may_take_argmax(self, outputs: Any, labels: object, is_needed: bool) -> bool:
        metrics, timeout = self.trainer.compute_metrics, self.trainer.args.ddp_timeout
        roll = RollCall("EvaluationGuard")
        roll.sign()
        missing = roll.missing()
        is_needed = is_needed if missing else any_rank(is_needed, timeout, if_unknown=True)
        if not is_needed:
            return False
        why = missing or self._explain_no_argmax(outputs, labels)
        if missing or any_rank(why != "", timeout, if_unknown=True):
            logger.warning(
                "the logits are kept, and not their argmax: %s",
                why or "another rank found why; read its log",
            )
            return False
        assert metrics is not None
        self.trainer.compute_metrics = metrics_of_argmax(metrics, outputs.shape[-1])
        return True

    def _explain_no_argmax(self, outputs: object, labels: object) -> str:
        args, metrics = self.trainer.args, self.trainer.compute_metrics
        if not self.is_evaluation or metrics is None:
            return "predictions are returned as they are"
        if self.users_preprocess is not None or args.include_for_metrics:
            return "the Trainer has a preprocess_logits_for_metrics, or include_for_metrics"
        if not args.eval_do_concat_batches:
            return "batches are not joined (eval_do_concat_batches)"
        return explain_no_argmax(metrics, outputs, labels)
