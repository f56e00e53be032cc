"""Survival: finishes a step that runs out of memory in pieces, with exactly its gradient."""

from trainer_plugins.survival.attach import Survival, SurviveOOM, survive_oom

__all__ = ["Survival", "SurviveOOM", "survive_oom"]
