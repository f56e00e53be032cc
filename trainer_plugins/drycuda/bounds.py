"""Derive bounds from one plan for others, to skip hopeless runs."""

from collections.abc import Collection

from trainer_plugins.planner.cards import Card
from trainer_plugins.planner.plan import Category, MemoryPlan, Moment
from trainer_plugins.planner.tried import margin_bytes

_OF_ROWS: tuple[Category, ...] = ("activations", "logits and loss")


def short_moments(plan: MemoryPlan, card: Card) -> frozenset[Moment]:
    """Return the moments of a plan at which it exceeds a card."""
    margin = margin_bytes(card.capacity_bytes, "quantised" in plan.planned)
    usable = card.capacity_bytes - card.context_bytes - margin
    return frozenset(name for name, peak in plan.moments.items() if peak.allocated_bytes > usable)


def least_bytes(plan: MemoryPlan, freed: Collection[Category], part: float) -> int:
    """Return the smallest card that a run may need with part of its rows, without some categories.

    The memory of rows shrinks at most in proportion. The peak may move to another, higher moment.
    """
    held = plan.breakdown
    gone = sum(num_bytes for name, num_bytes in held.items() if name in freed)
    of_rows = sum(held.get(name, 0) for name in _OF_ROWS if name not in freed)
    least = plan.allocated_peak_bytes + plan.context_bytes - gone - int((1 - part) * of_rows)
    return least + margin_bytes(least, "quantised" in plan.planned)


def most_rows_by(plan: MemoryPlan, rows: int, spare_bytes: int) -> int:
    """Return how many rows at once may fit if each takes as much as one row of this plan."""
    of_a_row = sum(plan.breakdown.get(name, 0) for name in _OF_ROWS) / rows
    return rows + int(spare_bytes / of_a_row) if of_a_row else 1 << 30
