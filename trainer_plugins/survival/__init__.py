"""Survival: a step that runs out of memory is finished in pieces, with exactly its gradient."""

from trainer_plugins.survival.attach import Survival, SurviveOOM, survive_oom

__all__ = ["Survival", "SurviveOOM", "survive_oom"]
