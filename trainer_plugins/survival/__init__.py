"""Survival: a step that runs out of memory is finished in pieces, with exactly its gradient."""

from trainer_plugins.survival.attach import Survival, SurviveOOM, survive_oom
from trainer_plugins.survival.rehearsal import Rehearsal, RehearsalError, rehearse

__all__ = ["Rehearsal", "RehearsalError", "Survival", "SurviveOOM", "rehearse", "survive_oom"]
