"""Preflight: checks a run before step 1, and can refuse it on all ranks together."""

import logging
from typing import Literal

from trainer_plugins.callbacks._later import check_trainer
from trainer_plugins.callbacks._run import Event, RunCallback, calling_trainer, model_of
from trainer_plugins.devices import Device
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.hf_trainer import HfArguments, HfState
from trainer_plugins.record.timeline import Remark, Timeline
from trainer_plugins.upkeep.agreement import RollCall, any_rank

logger = logging.getLogger(__name__)


class PreflightError(RuntimeError):
    """The run was refused before its first step."""


class Preflight(RunCallback):
    """Checks a run, when training begins, for problems that usually end it hours later.

    >>> callback = Preflight(refuse_on="error")  # Trainer(..., callbacks=[callback])

    It looks at the GPU and its other users, main memory, the model, the data, the arguments and the
    environment; docs/check.md lists the checks. Findings go into the timeline of each rank. The
    first rank logs all of them, the others only errors.

    Cost: up to a second, once. It computes nothing, and changes nothing.

    Args:
        refuse_on: raise before step 1, on all ranks, if any rank has a finding this severe. None
            only reports. A check that crashes never refuses a run.
        device: the device of the tensors. Default: the run's.
        timeline: receives the findings. Default: the run's.

    Raises:
        PreflightError: when training begins, on every rank, if the run is refused.
    """

    def __init__(
        self,
        refuse_on: Literal["error", "warning"] | None = None,
        device: Device | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        if refuse_on not in ("error", "warning", None):
            raise ValueError(f"refuse_on is error, warning or None, got {refuse_on!r}")
        super().__init__(device, timeline)
        self.refuse_on = refuse_on

    def run_begins(self, args: HfArguments, state: HfState, event: Event) -> None:
        """Check the run. Raises PreflightError if this rank or another refuses it."""
        roll = RollCall("Preflight")
        if self.refuse_on is not None:
            roll.sign()
        found: tuple[Finding, ...] = ()
        with self.harmless():
            trainer, device = calling_trainer(), self.device_for(args)
            if trainer is not None and device is not None:
                found = check_trainer(trainer, model_of(event), event.get("optimizer"), device)
            for finding in found:
                if finding.severity > Severity.INFO:
                    self.timeline_for(args).add(Remark(step=state.global_step, finding=finding))
                if args.process_index == 0 or finding.severity >= Severity.ERROR:
                    logger.log(finding.severity, "%s", finding)
        if self.refuse_on is not None:
            least = Severity[self.refuse_on.upper()]
            mine = [each for each in found if each.severity >= least]
            refuses = bool(mine)
            if missing := roll.missing():
                logger.warning("Preflight refuses on single ranks only: %s", missing)
            else:
                refuses = any_rank(refuses, args.ddp_timeout, if_unknown=refuses)
            if refuses:
                why = [f"\n  {each}" for each in mine] or [" another rank found why; read its log"]
                raise PreflightError(f"the training is refused before step 1:{''.join(why)}")
