"""OOMReporter: records the facts that `explain` needs when a run dies of an OOM."""

import atexit
import logging
import os
import socket
import sys
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import time

from transformers import Trainer

from trainer_plugins.callbacks._later import explain_in_short, plan_before
from trainer_plugins.callbacks._run import (
    Event,
    Method,
    RunCallback,
    callback_of,
    calling_trainer,
    wrap_once,
)
from trainer_plugins.compiled import lock
from trainer_plugins.devices import Device, HostDevice
from trainer_plugins.devices.accelerator import open_device
from trainer_plugins.hf_trainer import HfArguments, HfState, HfTrainer
from trainer_plugins.launch.gather_run_facts import facts_of_trainer, try_read
from trainer_plugins.launch.in_force import strategy_of
from trainer_plugins.launch.masked import mask_error
from trainer_plugins.oom import OutOfMemory, classify
from trainer_plugins.printable import printable
from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.folder import folder_of_run, output_dir_of, read_one, write_new
from trainer_plugins.record.run_facts import RunFacts
from trainer_plugins.record.timeline import Failure, Sample, Timeline
from trainer_plugins.upkeep.allocations import forget_history, keep_snapshot, record_history
from trainer_plugins.upkeep.peers import watch_peers
from trainer_plugins.upkeep.stack import find_last_errors, frames_above

logger = logging.getLogger(__name__)


class OOMReporter(RunCallback):
    """Records why `train()`, `evaluate()` or `predict()` ran out of memory.

    >>> callback = OOMReporter(snapshot=True)  # Trainer(..., callbacks=[callback])

    The record is `<output_dir>/_trainer_plugins/oom-rank<R>.json`, one per failed rank. It never
    replaces an older one. It holds the error's words and numbers, the frames, step and moment, the
    live tensors and their holders, the batch's shapes, the last readings, the other ranks and the
    host. A line on stderr gives its path, and `trainer-plugins explain <output_dir>` reads it.

    The original exception propagates, even if nothing can be written. If it ends the program, the
    first rank to end prints the explanation below the traceback.

    When training begins, rank 0 writes `run.json` there: arguments and the model's config without
    secrets, the strategy in force, versions, GPU, driver and limits.

    Cost: some milliseconds when training begins, and up to a second after a failure. The first
    reporter in a process wraps the three methods of `transformers.Trainer`; Trainers without this
    callback are not affected.

    With `snapshot=True`, on CUDA, torch keeps the last 100,000 allocations of training (2
    microseconds each, by its own documentation), and writes a snapshot when the error is raised.
    """

    def __init__(
        self, snapshot: bool = False, device: Device | None = None, timeline: Timeline | None = None
    ) -> None:
        super().__init__(device, timeline)
        self.snapshot = snapshot
        for name in ("train", "evaluate", "predict"):
            wrap_once(name, OOMReporter, partial(_report_errors, name))

    def reset(self) -> None:
        super().reset()
        self._began_seconds = time()
        self._facts: RunFacts | None = None

    def run_begins(self, args: HfArguments, state: HfState, event: Event) -> None:
        trainer = calling_trainer()
        if trainer is None:
            return
        folder = folder_of_run(Path(args.output_dir))
        with self.harmless():
            self._facts = self._gather(trainer)
            if args.process_index == 0:
                _write(Path(args.output_dir), self._facts)
            if args.world_size > 1:
                self.undo.callback(watch_peers(folder / "memory"))
        if self.snapshot:
            self.undo.callback(forget_history)
            with self.harmless():
                if not record_history(folder, args.process_index):
                    logger.warning(
                        "OOMReporter(snapshot=True) needs a CUDA card: there is no snapshot"
                    )

    def run_raises(self) -> None:
        """Keep torch's history of allocations for `report`, which runs later and writes it."""

    def report(self, trainer: HfTrainer, call: str, error: BaseException) -> None:
        """While handling an exception, add it to the timeline, and record it if it is an OOM."""
        with self.harmless():
            found = classify(error)
            failure = Failure(
                step=trainer.state.global_step,
                words=mask_error(error),
                record="" if found is None else self._record(trainer, call, error, found),
                num_oom_kills=HostDevice().facts().num_oom_kills,
                host=socket.gethostname(),
            )
            self.timeline_for(trainer.args).add(failure)
            self.end_run()
            if failure.record:
                path = folder_of_run(Path(trainer.args.output_dir)) / failure.record
                atexit.register(_explain_if_it_ended_the_program, path, failure.words)

    def _record(
        self, trainer: HfTrainer, call: str, error: BaseException, found: OutOfMemory
    ) -> str:
        # An OOM may never come, and this takes as long to import as most callbacks together.
        from trainer_plugins.upkeep.post_mortem import make_record, write_record

        folder = Path(trainer.args.output_dir)
        record = make_record(
            error,
            found,
            folder,
            self._device_of(trainer.args),
            call=call,
            run=self._facts or self._gather(trainer),
            step=trainer.state.global_step,
            readings=_select_this_run(self.timeline_for(trainer.args)),
            trainer_class=Trainer,
            snapshot=keep_snapshot() if self.snapshot else "",
            plan=try_read(lambda: plan_before(trainer, folder), None),
        )
        return write_record(record, folder)

    def _device_of(self, args: HfArguments) -> Device | None:
        # Log nothing: without a device everything else is still written.
        return self._given_device or try_read(lambda: open_device(args.device), None)

    def _gather(self, trainer: HfTrainer) -> RunFacts:
        args = trainer.args
        read_strategy = partial(strategy_of, trainer.model_wrapped, trainer.optimizer, args)
        device, strategy = self._device_of(args), try_read(read_strategy, None)
        return facts_of_trainer(trainer, device, self._began_seconds, strategy)


def _write(folder: Path, facts: RunFacts) -> None:
    try:
        write_new(folder, "run", asdict(facts))
    except OSError as error:
        logger.warning(
            "run.json cannot be written to %s (%s): training goes on, and `explain` will know less"
            " about it. Free some space, or set output_dir to a writable folder",
            printable(folder),
            error.strerror or error,
        )


def _explain_if_it_ended_the_program(path: Path, words: str) -> None:
    """Print the explanation below the traceback; of several failed ranks only the first does."""
    from trainer_plugins.record.oom_record import OomRecord

    with suppress(Exception):  # the record exists, and `explain` reports any problem with it
        record, folder = read_one(path, OomRecord), output_dir_of(path.parent)
        if record is None or words not in map(mask_error, find_last_errors()):
            return
        if record.run.world_size > 1 and not _is_first(path.parent, record.run.time_seconds):
            return
        for line in explain_in_short(record, folder):
            sys.stderr.write(f"{printable(line)}\n")


def _is_first(folder: Path, began_seconds: float) -> bool:
    """Return whether this is the first rank of the run to explain it; ranks come in any order."""
    told = folder / "explained"
    with lock(folder):
        if told.exists() and told.stat().st_mtime > began_seconds:
            return False
        told.write_text(f"{os.getpid()}\n")
        return True


def _select_this_run(timeline: Timeline) -> tuple[MemoryReading, ...]:
    """Return the readings since training last began; one file may hold several runs."""
    samples = [each for each in timeline if isinstance(each, Sample)]
    first = max((at for at, each in enumerate(samples) if each.moment == "begin"), default=0)
    return tuple(each.reading for each in samples[first:])


def _report_errors(
    name: str, method: Method, trainer: HfTrainer, *args: object, **kwargs: object
) -> object:
    """Pass a method's exceptions to the Trainer's reporter: no event does."""
    try:
        return method(trainer, *args, **kwargs)
    except BaseException as error:
        reporter = callback_of(trainer, OOMReporter)
        if reporter is not None and not _is_inside_another(trainer):
            reporter.report(trainer, name, error)
        raise


def _is_inside_another(trainer: HfTrainer) -> bool:
    """Return whether an outer call of these methods on this Trainer will see the full traceback."""
    frames = frames_above()
    code = next(frames).f_code
    return any(frame.f_code is code and frame.f_locals["trainer"] is trainer for frame in frames)
