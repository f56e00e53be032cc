"""OOMReporter: a run that dies of an out-of-memory error leaves what an explanation needs."""

import functools
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from time import time
from typing import Any

from accelerate.state import AcceleratorState
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from trainer_plugins.callbacks._run import RunCallback, callback_of, calling_trainer
from trainer_plugins.devices import Device, HostDevice, open_device
from trainer_plugins.launch.facts import facts_of_process, facts_of_trainer, tried
from trainer_plugins.launch.in_force import read_in_force
from trainer_plugins.oom import classify
from trainer_plugins.planner.before import plan_before
from trainer_plugins.printable import printable
from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.folder import folder_of_run, write_new
from trainer_plugins.record.run_facts import RunFacts
from trainer_plugins.record.timeline import Failure, Sample, Timeline
from trainer_plugins.strategy import Strategy
from trainer_plugins.upkeep.frames import frames_above
from trainer_plugins.upkeep.post_mortem import Scene, first_line, record_oom
from trainer_plugins.upkeep.snapshot import forget_history, keep_snapshot, record_history

logger = logging.getLogger(__name__)


class OOMReporter(RunCallback):
    """Writes down why `train()`, `evaluate()` or `predict()` ran out of memory.

    The record is `<output_dir>/_trainer_plugins/oom-rank<R>.json`, one for each rank that failed,
    never over an older one: the error's words and numbers, the frames, step and moment, what was
    alive and who holds it, the batch's shapes, the last readings, the other ranks, the host. One
    line on stderr says where it is, and `trainer-plugins explain <output_dir>` reads it. The error
    goes on unchanged, even if nothing can be written.

    When training begins, rank 0 writes `run.json` there: arguments and the model's config without
    secrets, the strategy in force, versions, card, driver and limits.

    Cost: some milliseconds when training begins, and up to a second when it has failed. The first
    reporter of a process wraps the three methods of `transformers.Trainer`; a Trainer without this
    callback is left alone by them.

    With `snapshot=True`, on CUDA, torch remembers the last 100,000 allocations of training, which
    it puts at 2 microseconds each, and writes its own snapshot inside the throw. Not yet measured
    on a GPU.
    """

    def __init__(
        self,
        snapshot: bool = False,
        device: Device | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        super().__init__(device, timeline)
        self.snapshot = snapshot
        _wrap_trainer()

    def at_rest(self) -> None:
        super().at_rest()
        self._began_seconds = time()
        self._facts: RunFacts | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self.begin_run()
        trainer = calling_trainer()
        if self.is_second(state) or trainer is None:
            return
        with self.harmless():
            self._facts = self._gather(trainer)
            if args.process_index == 0:
                _write(Path(args.output_dir), self._facts)
        with self.harmless():
            if self.snapshot and not record_history(
                folder_of_run(Path(args.output_dir)), args.process_index
            ):
                logger.warning("OOMReporter(snapshot=True) needs a CUDA card: there is no snapshot")

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self.end_run()

    def end_run(self) -> None:
        super().end_run()
        if self.snapshot:
            forget_history()

    def report(self, trainer: Trainer, call: str, error: BaseException) -> None:
        """Note in the timeline that this Trainer raised, and record it if it was out of memory.

        Call it while the error is handled. It raises nothing, and keeps nothing of the error.
        """
        with self.harmless():
            args, step = trainer.args, trainer.state.global_step
            timeline = self.timeline_for(args)
            found = classify(error)
            record = ""
            if found is not None:
                scene = Scene(
                    folder=Path(args.output_dir),
                    call=call,
                    device=self._device_of(args),
                    run=self._facts or self._gather(trainer),
                    step=step,
                    readings=_of_this_run(timeline),
                    trainer_class=Trainer,
                    snapshot=keep_snapshot() if self.snapshot else "",
                    plan=tried(lambda: plan_before(trainer, Path(args.output_dir)), None),
                )
                record = record_oom(error, found, scene)
            timeline.add(
                Failure(
                    step=step,
                    words=first_line(error),
                    record=record,
                    num_oom_kills=HostDevice().facts().num_oom_kills,
                )
            )
            self.end_run()

    def _device_of(self, args: TrainingArguments) -> Device | None:
        # Without a device the rest is written all the same. So nothing is said of it.
        return self._given_device or tried(lambda: open_device(args.device), None)

    def _gather(self, trainer: Trainer) -> RunFacts:
        args = trainer.args
        facts = facts_of_process(
            self._device_of(args),
            args.process_index,
            args.world_size,
            self._began_seconds,
            trainer.state.global_step,
        )
        return facts_of_trainer(facts, trainer, tried(lambda: _strategy(trainer), None))


def _write(folder: Path, facts: RunFacts) -> None:
    try:
        write_new(folder, "run", asdict(facts))
    except OSError as error:
        logger.warning(
            "run.json cannot be written to %s (%s): training goes on, and `explain` will know less"
            " of it. Free some space, or set output_dir to a writable folder",
            printable(folder),
            error.strerror or error,
        )


def _of_this_run(timeline: Timeline) -> tuple[MemoryReading, ...]:
    """Return the readings since a training began here; one file may hold several runs."""
    readings: list[MemoryReading] = []
    for each in timeline:
        if isinstance(each, Sample):
            if each.moment == "begin":
                readings.clear()
            readings.append(each.reading)
    return tuple(readings)


def _strategy(trainer: Trainer) -> Strategy | None:
    return read_in_force(
        trainer.model_wrapped,
        trainer.optimizer,
        distributed_type=AcceleratorState().distributed_type.value,
        world_size=trainer.args.world_size,
        device=trainer.args.device.type,
    )


def _wrap_trainer() -> None:
    """Let a Trainer that has a reporter tell it what its three methods raise.

    The class is wrapped, not the instance: so the methods of a copied Trainer are its own, and a
    callback that is added late counts. The Trainer has no event for an error.
    """
    for name in ("train", "evaluate", "predict"):
        method = getattr(Trainer, name)
        if not getattr(method, "tells_reporter", False):
            setattr(Trainer, name, _telling(method, name))


def _telling(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Trainer, *args: object, **kwargs: object) -> object:
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            reporter = callback_of(self, OOMReporter)
            if reporter is not None and not _is_within_another(self):
                reporter.report(self, name, error)
            raise

    vars(call)["tells_reporter"] = True
    return call


def _is_within_another(trainer: Trainer) -> bool:
    """Return whether the error goes on to another of these methods of this Trainer.

    An evaluation inside training is one. Only the outermost has all of the traceback.
    """
    frames = frames_above()
    code = next(frames).f_code
    return any(frame.f_code is code and frame.f_locals["self"] is trainer for frame in frames)
