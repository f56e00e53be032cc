"""Predict the memory of a run before launch: the real training step on tensors without bytes."""

from trainer_plugins.planner.calibrate import Calibration, Difference, calibrate
from trainer_plugins.planner.plan import (
    MemoryPlan,
    MomentPeak,
    NotPredicted,
    PlanError,
    TensorAtPeak,
)
from trainer_plugins.planner.predict import plan_run

__all__ = [
    "Calibration",
    "Difference",
    "MemoryPlan",
    "MomentPeak",
    "NotPredicted",
    "PlanError",
    "TensorAtPeak",
    "calibrate",
    "plan_run",
]
