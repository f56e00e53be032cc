"""Changes a command that runs on dry cards, by the TrainingArguments and variables that it gets."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import yaml

from trainer_plugins.advice.entry import flags_in
from trainer_plugins.drycuda.dry_run import DryRun
from trainer_plugins.planner.compare import switches
from trainer_plugins.planner.compare.switches import Switch
from trainer_plugins.planner.plan import PlanError, Proposal

WAYS: tuple[tuple[Switch, ...], ...] = (
    (),
    (switches.FUSED_LOSS,),
    (switches.CHECKPOINTING,),
    (switches.FUSED_LOSS, switches.CHECKPOINTING),
    (switches.OFFLOADED_ACTIVATIONS,),
    (switches.FUSED_LOSS, switches.OFFLOADED_ACTIVATIONS),
    (switches.CHECKPOINTING, switches.EIGHT_BIT_OPTIMIZER),
    (switches.FUSED_LOSS, switches.CHECKPOINTING, switches.EIGHT_BIT_OPTIMIZER),
)
"""What is tried besides fewer rows: the ways that keep the training first, then the faster."""


class Fitted(NamedTuple):
    """Holds arguments with which a command fits."""

    proposal: Proposal
    planned: Mapping[str, object]
    """Some of the TrainingArguments with which the command was planned."""

    changed: Mapping[str, object]
    """The TrainingArguments that are to be others."""

    rows_at_once: int = 0
    """How many of the longest rows survival computes at once; 0 if all fit."""

    vouches: bool = False
    """Whether survival has to be told that the loss is a sum or a mean, as its code says."""


def effort(way: tuple[Switch, ...]) -> int:
    """Rank a way by what it changes; a streamed base comes late, since it needs this package."""
    return sum(each.changes_result for each in way) + 2 * (switches.STREAMED_BASE in way)


def is_usual(arguments: Mapping[str, Any]) -> bool:
    """Return whether accelerate's settings are its own."""
    from transformers.trainer_pt_utils import AcceleratorConfig

    # One of them is taken out while the arguments are made.
    return bool(arguments["accelerator_config"].items() <= AcceleratorConfig().to_dict().items())


def run_with(run: DryRun, changed: Mapping[str, object]) -> DryRun:
    """Return a run with other TrainingArguments."""
    return replace(run, changed={**run.changed, **changed}, snapshot=None, foretells=True)


def turn(run: DryRun, change: Switch) -> DryRun:
    """Change a run by a switch: a request in all that it says, a command by its arguments."""
    if (request := run.of_config) is not None:
        return replace(run, request=change.turn(request), snapshot=None)
    if change == switches.ADAPTER_IN_SCRIPT:
        return run_with(run, {"peft_config": switches.LORA})
    if flags := flags_in(change.flags):
        # YAML reads booleans, numbers, JSON and words as TrainingArguments hold them
        return run_with(run, {name: yaml.safe_load(text) for name, text in flags.items()})
    variable, is_one, value = change.flags.partition("=")
    if is_one and variable.isupper():
        return replace(run, environment={**run.environment, variable: value}, snapshot=None)
    raise PlanError("the command itself says this: change it there")
