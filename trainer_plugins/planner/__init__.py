"""Predict the memory of a run before launch: the real training step on tensors without bytes."""

from trainer_plugins.planner.calibrate import Calibration, Difference, calibrate
from trainer_plugins.planner.plan import (
    MemoryPlan,
    MomentPeak,
    NotPredicted,
    PlanError,
)

__all__ = [
    "Calibration",
    "Difference",
    "MemoryPlan",
    "MomentPeak",
    "NotPredicted",
    "PlanError",
    "calibrate",
]
