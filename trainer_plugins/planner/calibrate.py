"""Compare a plan with MemoryWatchdog's readings of the real run, and keep the measured context."""

import json
import re
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from trainer_plugins.compiled import cache_folder
from trainer_plugins.planner.cards import Card
from trainer_plugins.planner.plan import MemoryPlan, Moment, MomentPeak, PlanError
from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.folder import replacing
from trainer_plugins.record.history import Timelines, entries_of, read_history
from trainer_plugins.record.timeline import Beginning, Flush, Remark, Sample
from trainer_plugins.units import size

_MOMENTS_SEEN: dict[str, tuple[Moment, ...]] = {
    "train": ("forward", "backward", "optimizer step"),
    "eval": ("evaluation",),
    "predict": ("evaluation", "generation"),
    "generate": ("generation",),
    "save": ("save",),
}  # the watchdog's moments, each with the plan's moments that it covers

_SAME_CARD = 0.05  # as a fraction of total memory: drivers and ECC differ by less
# a larger context includes memory of other processes
_LARGEST_CONTEXT_FRACTION, _LARGEST_CONTEXT_BYTES = 0.1, 3 << 29


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Holds the predicted and the measured value of one counter at one moment. Sizes in bytes."""

    moment: str  # as the watchdog names it: `train`, `eval`, `predict`, `generate`, `save`
    # `allocated`, `reserved`, or `card`: all memory of the card in use, by any process
    counter: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def fraction(self) -> float:
        """Return the error as a fraction of the measurement; negative if the plan is too low."""
        if not self.measured_bytes:
            return 0.0
        return (self.predicted_bytes - self.measured_bytes) / self.measured_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Holds the comparison of a plan with a run."""

    differences: tuple[Difference, ...]  # the worst first
    # the most memory of the card in use outside the allocator: context, NCCL, other processes
    context_bytes: int
    kept_in: Path | None  # the file that keeps this context for later plans, if any
    remarks: tuple[str, ...]  # notes on how to read these numbers


def calibrate(plan: MemoryPlan, run_dir: str | Path) -> Calibration:
    """Compare a plan with the timelines of its run, and keep the measured context.

    Only the context is kept, for this kind of card and this version of torch; no prediction is ever
    scaled by a factor. The last run in the folder counts, and its rank with the most memory.

    Args:
        plan: the plan that was made for the run.
        run_dir: the output_dir of a run that had MemoryWatchdog.

    Raises:
        PlanError: there are no timelines, or they belong to another model, world size or card.
        OSError: the context cannot be written.
    """
    run_dir = Path(run_dir)
    ranks = timelines_of(run_dir)
    refuse_another_run(plan, ranks)
    differences = differences_of(plan, ranks)
    context_bytes = max(each.reading.non_torch_bytes for _, each in entries_of(ranks, Sample))
    flushes = len([*entries_of(ranks, Flush)])
    remarks = []
    if flushes:
        remarks.append(
            f"the run emptied its cache {flushes} times: between two readings it may have reserved"
            " more"
        )
    doubt = _doubt_about_context(plan, ranks, context_bytes)
    kept_in = None
    if doubt is not None:
        remarks.append(f"the context size is not stored: {doubt}")
    elif plan.gpu is not None:
        kept_in = keep_context(plan.gpu, context_bytes, run_dir.absolute())
    return Calibration(
        differences=tuple(sorted(differences, key=lambda each: -abs(each.fraction))),
        context_bytes=context_bytes,
        kept_in=kept_in,
        remarks=tuple(remarks),
    )


def timelines_of(run_dir: Path) -> Timelines:
    """Read the timelines of the last run in a folder."""
    try:
        runs = read_history(run_dir).runs
    except (OSError, ValueError) as error:
        raise PlanError(f"--calibrate: {error}") from error
    ranks = runs[-1].timelines if runs else {}
    if not any(each.moment in _MOMENTS_SEEN for _, each in entries_of(ranks, Sample)):
        raise PlanError(
            f"--calibrate: {run_dir} has no reading of a training step, an evaluation or a save"
        )
    return ranks


def differences_of(plan: MemoryPlan, ranks: Timelines) -> list[Difference]:
    """Compare each counter at each moment."""
    found = []
    for moment, peak in peaks_as_seen(plan).items():
        seen = _readings_in(ranks, moment)
        if not seen:
            continue
        held = _readings_in(ranks, moment, before_evaluation=moment == "train") or seen
        on_card = peak.reserved_bytes + plan.context_bytes
        for counter, predicted, measured in (
            ("allocated", peak.allocated_bytes, max(each.peak_allocated_bytes for each in seen)),
            ("reserved", peak.reserved_bytes, max(each.reserved_bytes for each in held)),
            ("card", on_card, max(each.total_bytes - each.free_bytes for each in held)),
        ):
            difference = Difference(
                moment=moment, counter=counter, predicted_bytes=predicted, measured_bytes=measured
            )
            found.append(difference)
    return found


def peaks_as_seen(plan: MemoryPlan) -> dict[str, MomentPeak]:
    """Return the peaks of a plan, grouped by the watchdog's moments."""
    found = {}
    for moment, planned in _MOMENTS_SEEN.items():
        if peaks := [plan.moments[name] for name in planned if name in plan.moments]:
            found[moment] = MomentPeak(
                allocated_bytes=max(peak.allocated_bytes for peak in peaks),
                reserved_bytes=max(peak.reserved_bytes for peak in peaks),
            )
    return found


def _readings_in(
    ranks: Timelines, moment: str, before_evaluation: bool = False
) -> list[MemoryReading]:
    """Return the readings of all ranks at one moment.

    `before_evaluation` drops readings after a rank's first evaluation, whose reserved memory stays
    reserved.
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


def refuse_another_run(plan: MemoryPlan, ranks: Timelines, flag: str = "--calibrate") -> None:
    """Refuse timelines that cannot belong to the planned run."""
    if why := _find_contradiction(plan, ranks):
        raise PlanError(f"{flag}: {why}")


def _find_contradiction(plan: MemoryPlan, ranks: Timelines) -> str | None:
    if plan.cards:
        return (
            f"the plan is for the fullest of {len(plan.cards)} GPUs of one process, and a timeline"
            " covers its first: compare max_memory_reserved of each with plan.cards"
        )
    for rank, begun in entries_of(ranks, Beginning):
        ran = begun.strategy
        if ran.num_params != plan.num_parameters:
            return (
                f"rank {rank} trained a model of {ran.num_params:,} parameters, the plan is for one"
                f" of {plan.num_parameters:,}"
            )
        if ran.world_size != plan.num_gpus:
            return f"the run had {ran.world_size} ranks, the plan has {plan.num_gpus} GPUs"
    for _, sample in entries_of(ranks, Sample):
        device, total = sample.reading.device, sample.reading.total_bytes
        if device == "cpu":
            return "the run was on the CPU, the plan is for a GPU"
        planned = plan.capacity_bytes
        if planned is not None and abs(total - planned) > _SAME_CARD * planned:
            on = f"the run was on {device} of {size(total)}"
            return f"{on}, the plan is for {plan.gpu} of {size(planned)}"
    if len(ranks) > plan.num_gpus:
        return f"there are timelines of {len(ranks)} ranks, the plan has {plan.num_gpus} GPUs"
    return None


def _doubt_about_context(plan: MemoryPlan, ranks: Timelines, context_bytes: int) -> str | None:
    if plan.gpu is None or plan.capacity_bytes is None:
        return "name the card with --gpu"
    if any(each.finding.code == "foreign-memory" for _, each in entries_of(ranks, Remark)):
        return "other processes were on the card: the run reported foreign-memory"
    most = min(_LARGEST_CONTEXT_BYTES, int(_LARGEST_CONTEXT_FRACTION * plan.capacity_bytes))
    if context_bytes > most:
        return (
            f"{size(context_bytes)} outside the allocator is more than a context, which takes"
            f" at most {size(most)}"
        )
    return None


def context_file(card_name: str) -> Path:
    """Return the file that keeps the context of this card with the installed torch, if any."""
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", card_name)
    return cache_folder() / "contexts" / f"{name}-torch{version('torch')}.json"


def keep_context(card_name: str, context_bytes: int, measured_in: Path) -> Path:
    """Save a context that was measured in the folder of a run, and return the file."""
    file = context_file(card_name)
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = {"context_bytes": context_bytes, "measured_in": str(measured_in)}
    with replacing(file) as draft:
        draft.write(json.dumps(kept).encode())
    return file


def add_measured_context(card: Card) -> Card:
    """Return the card with the context measured on this machine, or unchanged if there is none."""
    file = context_file(card.name)
    try:
        kept = json.loads(file.read_text())
        measured, folder = int(kept["context_bytes"]), kept["measured_in"]
    except (OSError, ValueError, KeyError, TypeError):
        return card
    source = f"measured in {folder} and stored in {file}; plan without it: --no-calibration"
    return replace(card, context_bytes=measured, context_source=source)
