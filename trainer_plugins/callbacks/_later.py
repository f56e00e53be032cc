"""The only way from callbacks to the planner, the check and explain: imported when called."""

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from trainer_plugins.devices import Device
from trainer_plugins.finding import Finding
from trainer_plugins.hf_trainer import HfTrainer

if TYPE_CHECKING:
    from trainer_plugins.record.oom_record import OomRecord, Planned


def check_trainer(
    trainer: HfTrainer, model: nn.Module, optimizer: object, device: Device
) -> tuple[Finding, ...]:
    """Return the findings of a check of a Trainer that is about to train."""
    from trainer_plugins.check import judge
    from trainer_plugins.check.gather_trainer import gather_trainer

    return judge(gather_trainer(trainer, model, optimizer, device)).findings


def plan_before(trainer: object, folder: Path) -> "Planned | None":
    """Return the plan made for a Trainer before it trained."""
    from trainer_plugins.planner import before

    return before.plan_before(trainer, folder)


def explain_in_short(record: "OomRecord", folder: Path) -> list[str]:
    """Explain an OOM in a few lines."""
    from trainer_plugins.explain.run import explain_record

    return [str(line) for line in explain_record(record, folder).brief()]
