"""Predicts what switches save that are asked for by their names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import reduce
from os import environ
from typing import TypeVar

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.allocator.machine import gather_machine
from trainer_plugins.allocator.variables import names_read
from trainer_plugins.planner.compare.switches import (
    ADAPTER,
    CHECKPOINTING,
    EIGHT_BIT_OPTIMIZER,
    FUSED_LOSS,
    FUSED_OPTIMIZER,
    HALF_LENGTH,
    OFFLOADED_ACTIVATIONS,
    STREAMED_BASE,
    Switch,
)
from trainer_plugins.planner.plan import MemoryPlan, PlanError, at_least
from trainer_plugins.planner.request import PlanRequest

_SEVERAL = "+"
Run = TypeVar("Run")  # PlanRequest, or a run of a command


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Holds what one switch changes in a run. Sizes in bytes, for one card."""

    change: str  # the switch by its name, or several joined by "+"
    how: str  # what to pass or set to get the change
    allocated_saved_bytes: int | None = None  # negative if it takes more; None: not predicted
    reserved_saved_bytes: int | None = None
    nvidia_smi_peak_bytes: int | None = None  # the peak with the switch
    fits: bool | None = None  # whether the run fits with the switch; None if no card was named
    reason: str | None = None  # why nothing is predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedChanges:
    """Holds the plan of a run as it is, and what switches change in it."""

    plan: MemoryPlan
    changes: tuple[Saved, ...]


def _expandable(run: PlanRequest) -> PlanRequest:
    key = _SETTING.partition(":")[0]
    parts = [part for part in run.allocator.split(",") if part]
    others = [part for part in parts if part.partition(":")[0] != key]
    return replace(run, allocator=",".join([*others, _SETTING]))


_EXPANDABLE = Switch(
    "expandable segments",
    advice.EXPANDABLE_SEGMENTS.price,
    advice.EXPANDABLE_SEGMENTS.flag(Door.ENVIRONMENT),
    _expandable,
)
_VARIABLE, _, _SETTING = _EXPANDABLE.flags.partition("=")
SWITCHES: dict[str, Switch] = {
    "checkpointing": CHECKPOINTING,
    "offloaded-activations": OFFLOADED_ACTIVATIONS,
    "fused-optimizer": FUSED_OPTIMIZER,
    "8bit-optimizer": EIGHT_BIT_OPTIMIZER,
    "liger": FUSED_LOSS,
    "lora": ADAPTER,
    "stream": replace(STREAMED_BASE, flags=f"{STREAMED_BASE.flags} (the callback StreamBase)"),
    "expandable-segments": _EXPANDABLE,
    "length/2": replace(HALF_LENGTH, flags="half of --seq-length"),
}  # in the order in which a reader would try them

ALL = "all"
_OTHER_NAMES = {
    "gradient_checkpointing": "checkpointing",
    "activation_checkpointing": "checkpointing",
    "adamw_torch_fused": "fused-optimizer",
    "adamw_bnb_8bit": "8bit-optimizer",
    "chunked-loss": "liger",
    "stream-base": "stream",
}


def changes_of(names: Sequence[str]) -> tuple[str, ...]:
    """Read the changes that are asked for: names of switches, or several joined by "+"."""
    asked = [each.strip() for name in names for each in name.split(",") if each.strip()]
    found = [*SWITCHES] if ALL in asked else []
    found += [name for name in asked if name != ALL and name not in found]
    for name in (part for change in found for part in change.split(_SEVERAL)):
        if name not in SWITCHES:
            near = get_close_matches(_OTHER_NAMES.get(name, name), SWITCHES, 1, 0.5)
            known = f"there are {', '.join(sorted(SWITCHES))}, and {ALL}"
            hint = f"is it {near[0]}?" if near else known
            raise PlanError(f"--explain-change: no switch is called {name!r}: {hint}")
    return tuple(dict.fromkeys(found))


def explain(
    run: Run,
    changes: Sequence[str],
    predict_all: Callable[[Sequence[Run]], list[MemoryPlan | PlanError]],
    turn: Callable[[Run, Switch], Run],
) -> tuple[MemoryPlan, tuple[Saved, ...]]:
    """Predict a run as it is and with each of the changes that `changes_of` returned."""

    def changed(change: str) -> Run | PlanError:
        try:
            return reduce(turn, (SWITCHES[name] for name in change.split(_SEVERAL)), run)
        except PlanError as error:
            return error

    every = {change: changed(change) for change in changes}
    requests = {change: way for change, way in every.items() if not isinstance(way, PlanError)}
    as_it_is, *outcomes = predict_all([run, *requests.values()])
    if isinstance(as_it_is, PlanError):
        raise as_it_is
    found = dict(zip(requests, outcomes, strict=True))
    found |= {change: error for change, error in every.items() if isinstance(error, PlanError)}
    return as_it_is, tuple(_saved(change, as_it_is, found[change]) for change in changes)


def _saved(change: str, before: MemoryPlan, after: MemoryPlan | PlanError) -> Saved:
    # the unified name is the last one, if this torch reads it
    variable = names_read(gather_machine(environ))[-1]
    flags = ", ".join(SWITCHES[name].flags for name in change.split(_SEVERAL))
    how = flags.replace(_VARIABLE, variable)
    if isinstance(after, PlanError):
        return Saved(change=change, how=how, reason=str(after))
    if after.streamed is not None and before.streamed is None:
        how += f"; {at_least(after.streamed.copy_seconds_per_step)}"
    return Saved(
        change=change,
        how=how,
        allocated_saved_bytes=before.allocated_peak_bytes - after.allocated_peak_bytes,
        reserved_saved_bytes=before.reserved_peak_bytes - after.reserved_peak_bytes,
        nvidia_smi_peak_bytes=after.nvidia_smi_peak_bytes,
        fits=after.fits,
    )
