"""These files try the worst of each moment of a run before step 1, and leave no trace."""

from trainer_plugins.survival.rehearsal.callback import Rehearsal, RehearsalError, rehearse

__all__ = ["Rehearsal", "RehearsalError", "rehearse"]
