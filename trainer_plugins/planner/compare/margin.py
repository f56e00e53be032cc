"""Say whether a plan leaves as much of the card free as plans are known to be wrong."""

from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.planner.tried import KNOWN_ERROR_IF_QUANTISED, KNOWN_ERROR_OF_RESERVED


def is_safe(plan: MemoryPlan) -> bool:
    """Return whether the run fits, even if the plan is as far off as any was."""
    needed = margin_bytes(plan.reserved_peak_bytes, "quantised" in plan.planned)
    return bool(plan.fits) and (plan.margin_bytes or 0) >= needed


def margin_bytes(reserved_bytes: int, is_quantised: bool = False) -> int:
    """Return how much must be left free beside so much reserved memory."""
    error = KNOWN_ERROR_IF_QUANTISED if is_quantised else KNOWN_ERROR_OF_RESERVED
    return int(reserved_bytes * error)


def grown(plan: MemoryPlan, factor: float) -> int:
    """Estimate the allocated bytes at the peak of the same run with so many times the tokens.

    Only what a batch makes grows: another moment may then be the highest, so it may be more. What
    an optimizer step makes has the size of the weights.
    """
    if plan.moment not in ("forward", "backward", "evaluation"):
        return plan.allocated_peak_bytes
    batch = sum(plan.breakdown.get(name, 0) for name in ("activations", "logits and loss"))
    return int(plan.allocated_peak_bytes + (factor - 1) * batch)
