"""Remember the plan of a Trainer before it trains, so that its OOM record can cite the plan."""

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from weakref import WeakKeyDictionary

from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.record.folder import from_json, read_json
from trainer_plugins.record.oom_record import Planned

FILE = "plan.json"  # the plan of a run, in its output_dir
_plans: WeakKeyDictionary[object, MemoryPlan] = WeakKeyDictionary()


def remember(trainer: object, plan: MemoryPlan) -> None:
    """Keep the plan for as long as the Trainer lives."""
    _plans[trainer] = plan


def plan_before(trainer: object, folder: Path) -> Planned | None:
    """Return the plan that `plan_run` made for this Trainer, else the plan in the run's folder."""
    if (plan := _plans.get(trainer)) is not None:
        return _make_planned(plan, "plan_run")
    with suppress(OSError, ValueError, TypeError):
        return _make_planned(from_json(MemoryPlan, read_json(folder / FILE)), FILE)
    return None


def _make_planned(plan: MemoryPlan, source: str) -> Planned:
    return from_json(Planned, {**asdict(plan), "source": source})
