"""Change a dry run: a command by its TrainingArguments and variables, or a config."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import yaml

from trainer_plugins.advice.entry import flags_in
from trainer_plugins.drycuda.dry_run import DryRun
from trainer_plugins.planner.cards import Card
from trainer_plugins.planner.compare import switches
from trainer_plugins.planner.compare.switches import Switch
from trainer_plugins.planner.plan import Category, MemoryPlan, Moment, PlanError, Proposal
from trainer_plugins.planner.tried import margin_bytes

_OF_ROWS: tuple[Category, ...] = ("activations", "logits and loss")


class Fitted(NamedTuple):
    """Holds arguments with which a command fits."""

    proposal: Proposal
    # some of the TrainingArguments with which the command was planned
    planned: Mapping[str, object]
    changed: Mapping[str, object]  # the TrainingArguments to change
    rows_at_once: int = 0  # how many of the longest rows survival computes at once; 0 if all fit
    # whether to vouch to survival that the loss is a sum or a mean, as its code says
    vouches: bool = False


def is_usual(arguments: Mapping[str, Any]) -> bool:
    """Return whether the accelerator settings are accelerate's defaults."""
    from transformers.trainer_pt_utils import AcceleratorConfig

    # One of them is removed while the arguments are built.
    return bool(arguments["accelerator_config"].items() <= AcceleratorConfig().to_dict().items())


def run_with(run: DryRun, changed: Mapping[str, object]) -> DryRun:
    """Return a run with other TrainingArguments."""
    return replace(run, changed={**run.changed, **changed}, snapshot=None, foretells=True)


def turn(run: DryRun, change: Switch) -> DryRun:
    """Apply a switch to a run: to a request in full, to a command by its arguments."""
    if (request := run.of_config) is not None:
        return replace(run, request=change.turn(request), snapshot=None)
    if change == switches.ADAPTER_IN_SCRIPT:
        return run_with(run, {"peft_config": switches.LORA})
    if flags := flags_in(change.flags):
        # YAML parses booleans, numbers, JSON and words as TrainingArguments hold them
        return run_with(run, {name: yaml.safe_load(text) for name, text in flags.items()})
    variable, is_one, value = change.flags.partition("=")
    if is_one and variable.isupper():
        return replace(run, environment={**run.environment, variable: value}, snapshot=None)
    raise PlanError("your command sets this itself: change it there")


# Bounds from one plan for others, to skip hopeless runs.


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
