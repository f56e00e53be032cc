"""MemoryWatchdog: reads memory at every step, evaluation and save, and warns before it is full."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from trainer_plugins.callbacks._evaluations import EvaluationCallback
from trainer_plugins.callbacks._run import Event, model_of, move_before_trackers
from trainer_plugins.devices import Device
from trainer_plugins.finding import Severity
from trainer_plugins.hf_trainer import HfArguments, HfState
from trainer_plugins.record.metrics import PrometheusFile
from trainer_plugins.record.timeline import Timeline, timeline_of_run
from trainer_plugins.upkeep.agreement import StepEndVote
from trainer_plugins.upkeep.generation import guard_generate, inside_training
from trainer_plugins.watch.memory_watch import GenerationPeaks, MemoryWatch
from trainer_plugins.watch.pressure import Budget

logger = logging.getLogger(__name__)


class MemoryWatchdog(EvaluationCallback):
    """Reads memory every `every_steps` steps and after each evaluation, prediction and save.

    >>> callback = MemoryWatchdog(every_steps=10, stop=True)  # Trainer(..., callbacks=[callback])

    Each of these moments has its own peak, and so has `generate` inside training. Readings and
    findings go to `<output_dir>/_trainer_plugins/memory/rank-<rank>.jsonl`, one line per write, so
    they survive a kill. A finding (pressure, foreign memory, fragmentation, leak, host memory: see
    `docs/findings.md`) is logged once at its own severity, and again when it gets worse.

    Each log line of training also gets `memory/peak_gib` and other metrics (see
    `docs/watchdog.md`), so they reach TensorBoard and the other trackers in `report_to`,
    `state.log_history` and `trainer_state.json`. These are rank 0's. With `prometheus_dir` each
    rank also writes its own to `<prometheus_dir>/trainer_plugins-rank-<rank>.prom`, in bytes, for
    the textfile collector of node_exporter.

    With `stop=True` an ERROR on any rank saves a checkpoint and stops training on all ranks.

    Cost: about 0.1 ms per reading, 0.2 ms on the CPU, and two readings per `generate`; with
    `stop=True` and several ranks also a vote, about 0.3 ms. See `docs/internals/measured.md`.
    """

    def __init__(
        self,
        every_steps: int = 1,
        warn_fraction: float = 0.90,
        act_fraction: float = 0.97,
        stop: bool = False,
        prometheus_dir: str | Path | None = None,
        timeline: Timeline | None = None,
        device: Device | None = None,
    ) -> None:
        if every_steps < 1:
            raise ValueError(
                f"every_steps is a number of optimizer steps, 1 or more, got {every_steps}"
            )
        super().__init__(device, timeline)
        self.every_steps = every_steps
        self.budget = Budget(warn_fraction, act_fraction)
        self.stop = stop
        self.prometheus_dir = None if prometheus_dir is None else Path(prometheus_dir)

    def reset(self) -> None:
        super().reset()
        self._watch: MemoryWatch | None = None
        self._prometheus: PrometheusFile | None = None
        self._stop_vote: StepEndVote | None = None
        self._worst: int = 0

    def run_begins(self, args: HfArguments, state: HfState, event: Event) -> None:
        with self.harmless():
            if not move_before_trackers(self):
                logger.info(
                    "MemoryWatchdog is not in the Trainer's own list of callbacks, and"
                    " trackers run before it: memory metrics go only to state.log_history."
                    " Pass it to the Trainer with callbacks=[...] or add_callback"
                )
        if self.stop:
            self._stop_vote = self.vote_every(self.every_steps, args)
        self._look(args, state, "begin")
        if self._watch is not None:
            with self.harmless():
                from trainer_plugins.upkeep.growth import GrowthTeller  # slow to import

                model = model_of(event)
                kind = self._watch.device.name.partition(":")[0]
                dataset = getattr(event.get("train_dataloader"), "dataset", None)
                self._watch.teller = GrowthTeller(kind, model, event.get("optimizer"), dataset)
                guard = partial(self._separate_peak, self._watch.generations)
                self.undo.callback(guard_generate(model, guard))
        super().run_begins(args, state, event)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **event: object
    ) -> None:
        is_due = state.global_step % self.every_steps == 0
        # Read training's peak before an evaluation or a save, which have their own.
        if is_due or control.should_evaluate or control.should_save:
            self._look(args, state, "train")
        super().on_step_end(args, state, control, **event)
        if self._stop_vote is not None and is_due:
            with self.harmless():
                worst = self._stop_vote.highest(self._worst, state.global_step)
                if worst is not None and worst >= Severity.ERROR:
                    control.should_save = control.should_training_stop = True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **event: object
    ) -> None:
        is_read_already = state.global_step % self.every_steps == 0
        if (control.should_evaluate or control.should_save) and not is_read_already:
            self._look(args, state, "train")
        super().on_epoch_end(args, state, control, **event)

    @contextmanager
    def evaluating(self, args: HfArguments, state: HfState, event: Event) -> Iterator[None]:
        model, watch = event.get("model"), None if inside_training() else self._watch
        with super().evaluating(args, state, event), ExitStack() as stack:
            if watch is not None and isinstance(model, nn.Module):
                guard = partial(self._separate_peak, watch.generations)
                stack.callback(guard_generate(model, guard, outside_training=True))
            yield

    def evaluation_ends(self, args: HfArguments, state: HfState, moment: str, event: Event) -> None:
        self._look(args, state, moment)

    def on_save(self, args: HfArguments, state: HfState, *_: object, **event: object) -> None:
        super().on_save(args, state, **event)
        self._look(args, state, "save")

    def on_log(
        self, args: HfArguments, state: HfState, *_: object, logs: dict[str, float], **__: object
    ) -> None:
        # Only training's own lines have both: train() and evaluate() return the others.
        if {"loss", "learning_rate"} <= logs.keys():
            with self.harmless():
                self._publish(state, logs)

    def on_train_end(self, args: HfArguments, state: HfState, *_: object, **event: object) -> None:
        super().on_train_end(args, state, **event)
        self._look(args, state, "end")
        self.end_run()

    @contextmanager
    def _separate_peak(self, generations: GenerationPeaks, *_: object) -> Iterator[None]:
        """Separate the peak of a generation from that of the evaluation or step around it."""
        with self.harmless():
            generations.begin()
        try:
            yield
        finally:
            with self.harmless():
                generations.end()

    def _look(self, args: HfArguments, state: HfState, moment: str) -> None:
        device = self.device_if_first(args, state)
        if device is None:
            return
        with self.harmless():
            if self._watch is None:
                rank, timeline = args.process_index, self.timeline_for(args)
                if self.prometheus_dir is not None:
                    self._prometheus = PrometheusFile(self.prometheus_dir, rank, device.name)
                flushes = timeline, timeline_of_run(args.output_dir, rank)
                self._watch = MemoryWatch(device, timeline, self.budget, flushes)
            num_tokens = int(state.num_input_tokens_seen)
            for finding in self._watch.look(state.global_step, moment, num_tokens):
                self._worst = max(self._worst, finding.severity)
                logger.log(finding.severity, "step %d: %s", state.global_step, finding)

    def _publish(self, state: HfState, logs: dict[str, float]) -> None:
        metrics = None if self._watch is None else self._watch.metrics()
        if metrics is None:
            return
        logs.update(metrics)
        # The Trainer put a copy of `logs` there before on_log.
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(metrics)
        if self._prometheus is not None:
            self._prometheus.write(metrics)
