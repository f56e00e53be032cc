"""Define switches that save memory, and predict what each would save in a given run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from os import environ

from trainer_plugins.allocator.gather import gather_machine
from trainer_plugins.allocator.variables import names_read
from trainer_plugins.planner.compare.switches import (
    LORA,
    STREAM,
    as_flags,
    half_as_long,
    with_adapter,
    with_base_streamed,
    with_flags,
)
from trainer_plugins.planner.plan import MemoryPlan, PlanError, at_least
from trainer_plugins.planner.request import PlanRequest

_SEVERAL = "+"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Holds what one switch changes in a run. Sizes in bytes, for one card."""

    change: str
    """The switch by its name, or several joined by "+"."""

    how: str
    """What to pass or set to get the change."""

    allocated_saved_bytes: int | None = None
    """What the switch saves; negative if it takes more. None if nothing is predicted."""

    reserved_saved_bytes: int | None = None
    nvidia_smi_peak_bytes: int | None = None
    """The peak with the switch."""

    fits: bool | None = None
    """Whether the run fits with the switch; None if no card was named."""

    reason: str | None = None
    """Why nothing is predicted."""


@dataclass(frozen=True, slots=True)
class _Switch:
    name: str
    how: str
    """What to pass or set; `{ALLOC_CONF}` stands for the variable that this torch reads."""

    turn: Callable[[PlanRequest], PlanRequest]


def _flags(name: str, **flags: object) -> _Switch:
    return _Switch(name, as_flags(flags), lambda run: with_flags(run, **flags))


def _expandable(run: PlanRequest) -> PlanRequest:
    others = [
        part
        for part in run.allocator.split(",")
        if part and not part.startswith("expandable_segments:")
    ]
    return replace(run, allocator=",".join([*others, "expandable_segments:True"]))


SWITCHES = (
    _flags("checkpointing", gradient_checkpointing=True),
    _flags("fused-optimizer", optim="adamw_torch_fused"),
    _flags("8bit-optimizer", optim="adamw_bnb_8bit"),
    _flags("liger", use_liger_kernel=True),
    _Switch("lora", LORA, with_adapter),
    _Switch("stream", f"{STREAM} (the callback StreamBase)", with_base_streamed),
    _Switch("expandable-segments", "{ALLOC_CONF}=expandable_segments:True", _expandable),
    _Switch("length/2", "half of --seq-length", half_as_long),
)
"""All switches, in the order in which a reader would try them."""

ALL = "all"


def changes_of(names: Sequence[str]) -> tuple[str, ...]:
    """Read the changes that are asked for: names of switches, or several joined by "+".

    `all` stands for each switch alone.

    Raises:
        PlanError: there is no switch of this name; the message names the nearest.
    """
    asked = [each.strip() for name in names for each in name.split(",") if each.strip()]
    found = [switch.name for switch in SWITCHES] if ALL in asked else []
    found += [name for name in asked if name != ALL and name not in found]
    known = {switch.name for switch in SWITCHES}
    for name in (part for change in found for part in change.split(_SEVERAL)):
        if name not in known:
            near = get_close_matches(_OTHER_NAMES.get(name, name), known, 1, 0.5)
            hint = (
                f"is it {near[0]}?" if near else f"there are {', '.join(sorted(known))}, and {ALL}"
            )
            raise PlanError(f"--explain-change: no switch is called {name!r}: {hint}")
    return tuple(dict.fromkeys(found))


_OTHER_NAMES = {
    "gradient_checkpointing": "checkpointing",
    "adamw_torch_fused": "fused-optimizer",
    "adamw_bnb_8bit": "8bit-optimizer",
    "chunked-loss": "liger",
    "stream-base": "stream",
}


def explain(
    run: PlanRequest,
    changes: Sequence[str],
    predict_all: Callable[[Sequence[PlanRequest]], list[MemoryPlan | PlanError]],
) -> tuple[MemoryPlan, tuple[Saved, ...]]:
    """Predict a run as it is and with each of the changes.

    Args:
        run: the run as it is.
        changes: what `changes_of` returned.
        predict_all: predicts several runs at once.

    Raises:
        PlanError: the run as it is cannot be predicted.
    """
    how = {change: _how(change) for change in changes}
    turned = {change: _turned(run, change) for change in changes}
    requests = {
        change: request for change, request in turned.items() if isinstance(request, PlanRequest)
    }
    as_it_is, *outcomes = predict_all([run, *requests.values()])
    if isinstance(as_it_is, PlanError):
        raise as_it_is
    found: dict[str, MemoryPlan | PlanError] = dict(zip(requests, outcomes, strict=True))
    found |= {change: error for change, error in turned.items() if isinstance(error, PlanError)}
    return as_it_is, tuple(
        _saved(change, how[change], as_it_is, found[change]) for change in changes
    )


def _turned(run: PlanRequest, change: str) -> PlanRequest | PlanError:
    try:
        for switch in _switches(change):
            run = switch.turn(run)
    except PlanError as error:
        return error
    return run


def _how(change: str) -> str:
    # the unified name is the last one, if this torch reads it
    variable = names_read(gather_machine(environ))[-1]
    how = ", ".join(switch.how for switch in _switches(change))
    return how.replace("{ALLOC_CONF}", variable)


def _switches(change: str) -> list[_Switch]:
    names = change.split(_SEVERAL)
    return [switch for name in names for switch in SWITCHES if switch.name == name]


def _saved(change: str, how: str, before: MemoryPlan, after: MemoryPlan | PlanError) -> Saved:
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
