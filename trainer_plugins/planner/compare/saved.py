"""Predict the savings of switches that the user asks for by name."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.planner.compare import switches
from trainer_plugins.planner.compare.switches import Switch, half_as_long
from trainer_plugins.planner.plan import MemoryPlan, PlanError, describe_least_seconds
from trainer_plugins.planner.request import PlanRequest

_SEVERAL = "+"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Holds the effect of one switch on a run. Sizes in bytes, for one card."""

    change: str  # the switch by its name, or several joined by "+"
    how: str  # what to pass or set to get the change
    allocated_saved_bytes: int | None = None  # negative if memory grows; None: not predicted
    reserved_saved_bytes: int | None = None
    nvidia_smi_peak_bytes: int | None = None  # the peak with the switch
    fits: bool | None = None  # whether the run fits with the switch; None if no card was named
    reason: str | None = None  # why there is no prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedChanges:
    """Holds the plan of a run as it is, and the effects of switches on it."""

    plan: MemoryPlan
    changes: tuple[Saved, ...]


def _expandable(run: PlanRequest) -> PlanRequest:
    settings = (run.allocator, _EXPANDABLE.flags.partition("=")[2])  # the last one counts
    return replace(run, allocator=",".join(filter(None, settings)))


_EXPANDABLE = Switch(
    "expandable segments",
    advice.EXPANDABLE_SEGMENTS.price,
    advice.EXPANDABLE_SEGMENTS.flag(Door.ENVIRONMENT),
    _expandable,
)
SWITCHES: dict[str, Switch] = {
    "checkpointing": switches.CHECKPOINTING,
    "offloaded-activations": switches.OFFLOADED_ACTIVATIONS,
    "fused-optimizer": switches.FUSED_OPTIMIZER,
    "8bit-optimizer": switches.EIGHT_BIT_OPTIMIZER,
    "liger": switches.FUSED_LOSS,
    "lora": switches.ADAPTER,
    "stream": replace(
        switches.STREAMED_BASE, flags=f"{switches.STREAMED_BASE.flags} (the callback StreamBase)"
    ),
    "expandable-segments": _EXPANDABLE,
    "length/2": Switch("half the length", "other data", "half of --seq-length", half_as_long),
}  # in the order in which `--explain-change all` shows them

ALL = "all"


def changes_of(names: Sequence[str]) -> tuple[str, ...]:
    """Parse the requested changes: names of switches, or several joined by "+"."""
    asked = [each.strip() for name in names for each in name.split(",") if each.strip()]
    found = [*SWITCHES] if ALL in asked else []
    found += [name for name in asked if name != ALL and name not in found]
    for name in (part for change in found for part in change.split(_SEVERAL)):
        if name not in SWITCHES:
            near = get_close_matches(name, SWITCHES, 1, 0.5)
            known = f"choose from {', '.join(sorted(SWITCHES))} and {ALL}"
            hint = f"did you mean {near[0]}?" if near else known
            raise PlanError(f"--explain-change: unknown change {name!r}: {hint}")
    return tuple(dict.fromkeys(found))


def switches_in(change: str) -> list[Switch]:
    """Return the switches that a change joins."""
    return [SWITCHES[name] for name in change.split(_SEVERAL)]


def measure_saving(change: str, before: MemoryPlan, after: MemoryPlan | PlanError) -> Saved:
    """Compare the plans before and after a change; `after` may be the reason why there is none."""
    how = ", ".join(each.flags for each in switches_in(change))
    if isinstance(after, PlanError):
        return Saved(change=change, how=how, reason=str(after))
    if after.streamed is not None and before.streamed is None:
        how += f"; {describe_least_seconds(after.streamed.copy_seconds_per_step)}"
    return Saved(
        change=change,
        how=how,
        allocated_saved_bytes=before.allocated_peak_bytes - after.allocated_peak_bytes,
        reserved_saved_bytes=before.reserved_peak_bytes - after.reserved_peak_bytes,
        nvidia_smi_peak_bytes=after.nvidia_smi_peak_bytes,
        fits=after.fits,
    )
