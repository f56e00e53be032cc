"""Judges pressure: how full a device may become."""

from dataclasses import dataclass

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


# What to change depends on what the run was doing at its peak.
_REMEDIES = {
    "eval": "Set eval_accumulation_steps=1 and a preprocess_logits_for_metrics that keeps only what"
    " the metric needs, or halve per_device_eval_batch_size.",
    "generate": "Halve per_device_eval_batch_size (in TRL's online trainers,"
    " per_device_train_batch_size), or the number of generated tokens: the cache grows with both.",
    "save": "Set save_only_model=True, or save a sharded state dict, so that no rank gathers the"
    " full model.",
}
_TRAIN_REMEDY = (
    "Halve per_device_train_batch_size and double gradient_accumulation_steps (the effective batch"
    " stays the same), or set gradient_checkpointing=True."
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
