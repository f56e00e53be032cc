"""Put two plans, a plan and a run, or two runs side by side: by moment and by category."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer_plugins.planner.calibrate import (
    MOMENTS_SEEN,
    peaks_as_seen,
    readings_in,
    timelines_of,
)
from trainer_plugins.planner.plan import MemoryPlan, MomentPeak, PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Holds one figure of both sides, in bytes; None where a side has none."""

    name: str  # the moment and the counter, `train, allocated`; or a category at the peak
    a_bytes: int | None
    b_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Holds the figures of two sides."""

    a: str
    b: str  # the paths of both sides
    changes: tuple[tuple[str, str, str], ...]  # what was planned otherwise: name, both texts
    moments: tuple[Pair, ...]
    categories: tuple[Pair, ...]  # at the peak of each plan; empty if a side is a run


@dataclass(frozen=True, slots=True)
class _Side:
    path: Path
    plan: MemoryPlan | None
    moments: Mapping[str, MomentPeak]


def beside(a: Path, b: Path) -> Beside:
    """Compare two sides, each a plan that was printed as JSON or the output_dir of a run."""
    one, other = _side(a), _side(b)
    mine, theirs = one.moments, other.moments
    changes: list[tuple[str, str, str]] = []
    categories: list[Pair] = []
    if one.plan is None or other.plan is None:
        mine, theirs = _seen(one), _seen(other)
    else:
        changes = _changes(one.plan.planned, other.plan.planned)
        held, also = one.plan.breakdown, other.plan.breakdown
        categories = [
            Pair(name=name, a_bytes=held.get(name, 0), b_bytes=also.get(name, 0))
            for name in dict.fromkeys((*held, *also))
        ]
    pairs = [
        Pair(
            name=f"{moment}, {counter}",
            a_bytes=getattr(mine.get(moment), f"{counter}_bytes", None),
            b_bytes=getattr(theirs.get(moment), f"{counter}_bytes", None),
        )
        for moment in dict.fromkeys((*mine, *theirs))
        for counter in ("allocated", "reserved")
    ]
    return Beside(
        a=str(one.path),
        b=str(other.path),
        changes=tuple(changes),
        moments=tuple(pairs),
        categories=tuple(categories),
    )


def _changes(one: Mapping[str, str], other: Mapping[str, str]) -> list[tuple[str, str, str]]:
    names = [name for name in dict.fromkeys((*one, *other)) if name != "command"]
    texts = [(name, one.get(name, ""), other.get(name, "")) for name in names]
    return [(name, mine, theirs) for name, mine, theirs in texts if mine != theirs]


def _side(path: Path) -> _Side:
    if path.is_dir():
        return _of_run(path)
    try:
        plan = MemoryPlan.from_json(path.read_text())
    except OSError as error:
        raise PlanError(f"--compare: {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        why = "it is not JSON" if isinstance(error, json.JSONDecodeError) else error
        raise PlanError(
            f"--compare: {path} is neither a plan printed with --json nor the folder of a run: "
            f"{why}"
        ) from error
    return _Side(path, plan, {str(name): peak for name, peak in plan.moments.items()})


def _of_run(path: Path) -> _Side:
    ranks = timelines_of(path, "--compare")
    peaks = {}
    for moment in MOMENTS_SEEN:
        if seen := readings_in(ranks, moment):
            peaks[moment] = MomentPeak(
                allocated_bytes=max(each.peak_allocated_bytes for each in seen),
                reserved_bytes=max(each.reserved_bytes for each in seen),
            )
    return _Side(path, None, peaks)


def _seen(side: _Side) -> Mapping[str, MomentPeak]:
    """Return the peaks by the moments that a run tells apart; a plan has no prediction."""
    if side.plan is None:
        return side.moments
    return {name: peak for name, peak in peaks_as_seen(side.plan).items() if name != "predict"}
