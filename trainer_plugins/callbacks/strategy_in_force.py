"""StrategyInForce: at the beginning of training, what was asked of the launch against what runs."""

import logging
import os
from typing import Any

from accelerate.state import AcceleratorState
from transformers import TrainerControl, TrainerState, TrainingArguments

from trainer_plugins.allocator import in_force as allocator
from trainer_plugins.callbacks._run import RunCallback, calling_trainer
from trainer_plugins.finding import Finding
from trainer_plugins.launch.asked import read_asked
from trainer_plugins.launch.extensions import lock_findings, read_locks
from trainer_plugins.launch.in_force import read_in_force
from trainer_plugins.launch.verify import verify
from trainer_plugins.record.timeline import Beginning, Remark

logger = logging.getLogger(__name__)


class StrategyInForce(RunCallback):
    """Says at the beginning of training as what it runs, and where that is not what was asked for.

    Asked is what the file and the flags of `accelerate launch`, the environment and
    TrainingArguments say, and what the variables of the allocator say. In force is what the objects
    of this process show: the wrapper, the ranks, the ZeRO stage, the share of parameters that is
    really divided, where each part lives, and the allocator's own settings. Findings are logged by
    the first rank; the strategy and the findings go into the timeline of every rank.

    When the Trainer has been built, and so before DeepSpeed compiles anything, it also says on
    which extension of torch this run would wait for ever, since an earlier build of it was cut off.

    Changes nothing. Cost: some milliseconds, once.
    """

    _found_before: tuple[Finding, ...] = ()

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        with self.harmless():
            self._found_before = tuple(lock_findings(read_locks(os.environ)))
            if args.process_index == 0:
                for finding in self._found_before:
                    logger.log(finding.severity, "%s", finding)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.begin_run()
        if self.is_second(state):
            return
        with self.harmless():
            trainer = calling_trainer()
            self._look(
                args,
                state,
                trainer.model_wrapped if trainer else kwargs["model"],
                kwargs.get("optimizer"),
            )

    def _look(
        self, args: TrainingArguments, state: TrainerState, wrapper: Any, optimizer: Any
    ) -> None:
        timeline = self.timeline_for(args)
        runs = read_in_force(
            wrapper,
            optimizer,
            distributed_type=AcceleratorState().distributed_type.value,
            world_size=args.world_size,
            device=args.device.type,
        )
        timeline.add(Beginning(step=state.global_step, strategy=runs))
        asked = read_asked(
            os.environ, getattr(args, "deepspeed", None), getattr(args, "fsdp", None)
        )
        findings: list[Finding | None] = [*verify(asked, runs), allocator.check()]
        is_first = args.process_index == 0
        if is_first:
            logger.info("training runs as %s", runs)
        for finding in self._found_before:
            timeline.add(Remark(step=state.global_step, finding=finding))
        for finding in filter(None, findings):
            timeline.add(Remark(step=state.global_step, finding=finding))
            if is_first:
                logger.log(finding.severity, "%s", finding)
