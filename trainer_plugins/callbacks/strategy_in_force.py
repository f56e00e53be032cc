"""StrategyInForce: compares the strategy you asked for with the one that runs."""

import logging
import os
import socket

from trainer_plugins.accumulation.effect import judge_accumulation
from trainer_plugins.allocator import in_force as allocator
from trainer_plugins.callbacks._run import Event, RunCallback, calling_trainer, model_of
from trainer_plugins.finding import Finding
from trainer_plugins.hf_trainer import HfArguments, HfState, HfTrainer
from trainer_plugins.launch.asked import Asked, read_asked
from trainer_plugins.launch.extensions import (
    announce_builds,
    find_needed,
    lock_findings,
    read_locks,
)
from trainer_plugins.launch.in_force import strategy_of
from trainer_plugins.launch.place import job
from trainer_plugins.launch.verify import judge_summed_gradient, verify
from trainer_plugins.record.timeline import Beginning, Remark

logger = logging.getLogger(__name__)


class StrategyInForce(RunCallback):
    """Reports the strategy in force when training begins, and any difference from your request.

    Your request is the file and flags of `accelerate launch`, the environment, TrainingArguments
    and the allocator's variables. The strategy in force is read from the objects of this process:
    the wrapper, the ranks, the ZeRO stage, the fraction of parameters actually sharded, the
    location of each part, and the allocator's own settings. Unless a Preflight does so, it also
    reads the code of the loss, to see whether gradients of micro-batches add up instead of
    averaging. The first rank logs the findings; every rank's timeline gets strategy and findings.

    With DeepSpeed, it also reports, once the Trainer is built and before DeepSpeed compiles
    anything, an extension of torch on which the run would wait forever because an earlier build was
    interrupted. From then on it prints a line on stderr for each first build of an extension, for
    which it wraps one function of torch.

    It changes nothing else. Cost: some milliseconds, once.
    """

    _found_before: tuple[Finding, ...] = ()

    def on_init_end(self, args: HfArguments, state: HfState, *_: object, **__: object) -> None:
        with self.harmless():
            asked = _read_request(args)
            if asked.family == "DeepSpeed":  # the only family that builds before step 1
                locks = read_locks(os.environ)
                self._found_before = tuple(lock_findings(locks, find_needed(asked.offload)))
            for finding in self._found_before:
                _log_on_first_rank(finding, args)
            if args.local_process_index == 0:
                announce_builds()

    def run_begins(self, args: HfArguments, state: HfState, event: Event) -> None:
        with self.harmless():
            trainer = calling_trainer()
            wrapper = model_of(event) if trainer is None else trainer.model_wrapped
            strategy = strategy_of(wrapper, event.get("optimizer"), args)
            step, timeline = state.global_step, self.timeline_for(args)
            host, scheduled = socket.gethostname(), job(os.environ)
            timeline.add(Beginning(step=step, strategy=strategy, host=host, job=scheduled))
            summed = _judge_summed_gradient(trainer) if trainer is not None else None
            others = filter(None, (allocator.check(), summed))
            found = [*verify(_read_request(args), strategy), *others]
            if args.process_index == 0:
                logger.info("training runs as %s", strategy)
            for finding in found:
                _log_on_first_rank(finding, args)
            for finding in (*self._found_before, *found):  # the earlier ones were logged already
                timeline.add(Remark(step=step, finding=finding))


def _judge_summed_gradient(trainer: HfTrainer) -> Finding | None:
    """Warn of a gradient that is a multiple of the intended mean, unless a Preflight does."""
    callbacks = trainer.callback_handler.callbacks
    if any(type(each).__name__ == "Preflight" for each in callbacks):
        return None
    args = trainer.args
    found = judge_accumulation(trainer)
    return judge_summed_gradient(found, args.gradient_accumulation_steps, args.world_size)


def _read_request(args: HfArguments) -> Asked:
    return read_asked(os.environ, args.deepspeed, args.fsdp)


def _log_on_first_rank(finding: Finding, args: HfArguments) -> None:
    if args.process_index == 0:
        logger.log(finding.severity, "%s", finding)
