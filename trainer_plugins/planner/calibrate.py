"""Compare a plan with what MemoryWatchdog saw in the real run: each moment, and what is not the allocator's."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer_plugins.planner.contexts import remember
from trainer_plugins.planner.plan import MemoryPlan, PlanError
from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.history import read_history
from trainer_plugins.record.timeline import Beginning, Entry, Flush, Remark, Sample
from trainer_plugins.units import size

_MOMENTS = {
    "train": ("forward", "backward", "optimizer step"),
    "eval": ("evaluation", "generation"),
    "predict": ("evaluation", "generation"),
    "save": ("save",),
}
"""What the watchdog tells apart, and which moments of a plan that is.

What comes before and after has no steps.
"""

_SAME_CARD = 0.05  # of its total: drivers, ECC and what is counted as the card's differ by less
_LARGEST_CONTEXT_FRACTION, _LARGEST_CONTEXT_BYTES = (
    0.1,
    3 << 29,
)  # what lies above it is somebody else's too


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One counter in one moment. Sizes in bytes."""

    moment: str
    """As the watchdog names it: `train`, `eval`, `predict`, `save`."""

    counter: str
    """`allocated`, `reserved`, or `card`: all that is taken of the card, by whomever."""

    predicted_bytes: int
    measured_bytes: int

    @property
    def fraction(self) -> float:
        """By how much the prediction is too high, of what was measured; below 0 it is too low."""
        return (
            (self.predicted_bytes - self.measured_bytes) / self.measured_bytes
            if self.measured_bytes
            else 0.0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A plan beside a run."""

    differences: tuple[Difference, ...]
    """The worst first."""

    context_bytes: int
    """The most that was taken of the card and was not the allocator's: the context, NCCL, and other processes."""

    kept_in: Path | None
    """The file from which later plans for this card take that context."""

    remarks: tuple[str, ...]
    """What to know about these numbers."""


def calibrate(plan: MemoryPlan, run_dir: str | Path) -> Calibration:
    """Compare a plan with the timelines of the run that it was made for, and keep the context that was measured.

    The context is all that is kept, for this kind of card and torch: no factor is ever put on a
    trace. Of several runs into one folder the last one counts, and of several ranks the one that
    has most.

    Args:
        plan: what was predicted.
        run_dir: the output_dir of a run that had MemoryWatchdog.

    Raises:
        PlanError: there are no timelines, or they are of another model, world size or card.
        OSError: the context cannot be kept.
    """
    run_dir = Path(run_dir)
    ranks = timelines_of(run_dir)
    _refuse_another_run(plan, ranks)
    differences = _differences(plan, ranks)
    context_bytes = max(
        each.reading.non_torch_bytes for each in _all(ranks) if isinstance(each, Sample)
    )
    remarks = _remarks(ranks)
    doubt = _doubt_about_context(plan, ranks, context_bytes)
    kept_in = None
    if doubt is not None:
        remarks.append(f"the context is not kept: {doubt}")
    elif plan.gpu is not None:
        kept_in = remember(plan.gpu, context_bytes, run_dir.absolute())
    return Calibration(
        differences=tuple(sorted(differences, key=lambda each: -abs(each.fraction))),
        context_bytes=context_bytes,
        kept_in=kept_in,
        remarks=tuple(remarks),
    )


def timelines_of(run_dir: Path) -> Mapping[int, Sequence[Entry]]:
    """The timelines of the last run into a folder, by rank.

    Raises:
        PlanError: there are none, or nothing in them can be compared.
    """
    try:
        runs = read_history(run_dir).runs
    except (OSError, ValueError) as error:
        raise PlanError(f"--calibrate: {error}") from error
    ranks = runs[-1].timelines if runs else {}
    if not any(isinstance(each, Sample) and each.moment in _MOMENTS for each in _all(ranks)):
        raise PlanError(
            f"--calibrate: {run_dir} has no reading of a training step, an evaluation or a save"
        )
    return ranks


def _differences(plan: MemoryPlan, ranks: Mapping[int, Sequence[Entry]]) -> list[Difference]:
    found = []
    for moment, planned in _MOMENTS.items():
        seen = _readings(ranks, moment)
        peaks = [plan.moments[name] for name in planned if name in plan.moments]
        if not seen or not peaks:
            continue
        reserved = max(peak.reserved_bytes for peak in peaks)
        held = _readings(ranks, moment, before_evaluation=moment == "train") or seen
        pairs = {
            "allocated": (
                max(peak.allocated_bytes for peak in peaks),
                max(reading.peak_allocated_bytes for reading in seen),
            ),
            "reserved": (reserved, max(reading.reserved_bytes for reading in held)),
            "card": (
                reserved + plan.context_bytes,
                max(reading.total_bytes - reading.free_bytes for reading in held),
            ),
        }
        found += [
            Difference(
                moment=moment, counter=counter, predicted_bytes=predicted, measured_bytes=measured
            )
            for counter, (predicted, measured) in pairs.items()
        ]
    return found


def _readings(
    ranks: Mapping[int, Sequence[Entry]], moment: str, before_evaluation: bool = False
) -> list[MemoryReading]:
    """Of all ranks.

    What an evaluation has reserved stays so in the training after it, which a plan has before it.
    """
    found = []
    for entries in ranks.values():
        for entry in entries:
            if not isinstance(entry, Sample):
                continue
            if before_evaluation and entry.moment in ("eval", "predict"):
                break
            if entry.moment == moment:
                found.append(entry.reading)
    return found


def _refuse_another_run(plan: MemoryPlan, ranks: Mapping[int, Sequence[Entry]]) -> None:
    for rank, entries in ranks.items():
        for entry in entries:
            if isinstance(entry, Beginning):
                ran = entry.strategy
                if ran.num_params != plan.num_parameters:
                    raise PlanError(
                        f"--calibrate: the run of rank {rank} trained a model of {ran.num_params:,} parameters, the "
                        f"plan is for one of {plan.num_parameters:,}"
                    )
                if ran.world_size != plan.num_gpus:
                    raise PlanError(
                        f"--calibrate: the run had {ran.world_size} ranks, the plan has {plan.num_gpus} GPUs"
                    )
            if isinstance(entry, Sample) and entry.reading.device == "cpu":
                raise PlanError("--calibrate: the run was on the CPU, the plan is for a card")
            if isinstance(entry, Sample) and plan.capacity_bytes is not None:
                total = entry.reading.total_bytes
                if abs(total - plan.capacity_bytes) > _SAME_CARD * plan.capacity_bytes:
                    raise PlanError(
                        f"--calibrate: the run was on {entry.reading.device} of {size(total)}, the plan is for "
                        f"{plan.gpu} of {size(plan.capacity_bytes)}"
                    )
    if len(ranks) > plan.num_gpus:
        raise PlanError(
            f"--calibrate: there are timelines of {len(ranks)} ranks, the plan has {plan.num_gpus} GPUs"
        )


def _doubt_about_context(
    plan: MemoryPlan, ranks: Mapping[int, Sequence[Entry]], context_bytes: int
) -> str | None:
    if plan.gpu is None or plan.capacity_bytes is None:
        return "name the card with --gpu"
    if any(
        isinstance(each, Remark) and each.finding.code == "foreign-memory" for each in _all(ranks)
    ):
        return "other processes were on the card, as the run has noted"
    most = min(_LARGEST_CONTEXT_BYTES, int(_LARGEST_CONTEXT_FRACTION * plan.capacity_bytes))
    if context_bytes > most:
        return f"{size(context_bytes)} outside the allocator is more than a context has, {size(most)} at most"
    return None


def _remarks(ranks: Mapping[int, Sequence[Entry]]) -> list[str]:
    flushes = sum(isinstance(each, Flush) for each in _all(ranks))
    if not flushes:
        return []
    return [
        f"the run gave its cache back {flushes} times: between two readings it may have reserved more"
    ]


def _all(ranks: Mapping[int, Sequence[Entry]]) -> Iterable[Entry]:
    return (entry for entries in ranks.values() for entry in entries)
