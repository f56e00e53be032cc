"""What a run will need of its card, before it is launched: the real training step on tensors without bytes."""

from trainer_plugins.planner.plan import MemoryPlan, MomentPeak, NotPredicted, PlanError, TensorAtPeak
from trainer_plugins.planner.run import plan_run

__all__ = ["MemoryPlan", "MomentPeak", "NotPredicted", "PlanError", "TensorAtPeak", "plan_run"]
