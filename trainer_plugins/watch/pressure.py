"""Judges pressure: how full a device may become."""

from dataclasses import dataclass

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.reading import MemoryReading
from trainer_plugins.units import percent, size


@dataclass(frozen=True, slots=True)
class Budget:
    """Holds two limits of a device, each a fraction of its total memory."""

    warn_fraction: float = 0.90
    act_fraction: float = 0.97

    def __post_init__(self) -> None:
        if not 0 < self.warn_fraction <= self.act_fraction <= 1:
            raise ValueError(
                "a budget needs 0 < warn_fraction <= act_fraction <= 1, "
                f"got warn_fraction={self.warn_fraction}, act_fraction={self.act_fraction}"
            )

    def severity(self, fraction: float) -> Severity | None:
        """Return the severity of using this fraction of the device; None within the budget."""
        if fraction < self.warn_fraction:
            return None
        return Severity.ERROR if fraction >= self.act_fraction else Severity.WARNING


_SMALLER_EVAL_BATCH = advice.SMALLER_EVAL_BATCH.flag(Door.ARGUMENTS)
# What to change depends on what the run was doing at its peak.
_REMEDIES = {
    "eval": f"To lower this peak, {_SMALLER_EVAL_BATCH}, set"
    f" {advice.OUTPUTS_TO_MAIN_MEMORY.flag(Door.ARGUMENTS, steps=1)}, or, if metrics need no"
    f" logits, pass {advice.EVALUATION_GUARD.flag(Door.CODE)}.",
    "generate": f"To lower this peak, {_SMALLER_EVAL_BATCH} (in TRL's online trainers, the training"
    " batch), or the number of generated tokens: the cache of keys and values grows with both.",
    "save": f"To lower this peak, set {advice.SAVE_ONLY_MODEL.flag(Door.ARGUMENTS)}, or save a"
    f" sharded state dict ({advice.SHARDED_SAVE.flag(Door.ACCELERATE)}), so that no rank gathers"
    " the full model.",
}
_TRAIN_REMEDY = (
    f"To lower this peak, {advice.SMALLER_MICRO_BATCH.flag(Door.ARGUMENTS)} (the effective batch"
    f" stays the same), or set {advice.CHECKPOINTING.flag(Door.ARGUMENTS)}."
)


def pressure(reading: MemoryReading, budget: Budget, moment: str) -> Finding | None:
    """Compare a reading's peak, including what others hold, with a budget."""
    severity = budget.severity(reading.pressure)
    if severity is None:
        return None
    return Finding(
        code="memory-pressure",
        severity=severity,
        summary=f"{reading.device} was {percent(reading.pressure)} full at its peak in {moment}",
        evidence=f"peak allocated {size(reading.peak_allocated_bytes)}, non-torch"
        f" {size(reading.non_torch_bytes)}, total {size(reading.total_bytes)}",
        remedy=_REMEDIES.get(moment, _TRAIN_REMEDY),
        amount=reading.pressure,
    )
