"""Recoveries: list the recovery for each kind of ranks."""

from trainer_plugins.survival.ranks.protocol import HowToRecover
from trainer_plugins.survival.training.planned import Planned
from trainer_plugins.survival.training.recovery import Recovery
from trainer_plugins.survival.training.replay_window import Replay

RECOVERIES: dict[HowToRecover, type[Recovery]] = {
    "alone": Recovery,
    "planned": Planned,
    "again": Replay,
}
