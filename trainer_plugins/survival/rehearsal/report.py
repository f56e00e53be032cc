"""Report: how each moment of a run went before step 1, as values, findings and a table."""

from dataclasses import dataclass
from typing import Literal

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.planner.plan import MemoryPlan, Moment
from trainer_plugins.printable import printable
from trainer_plugins.units import size

RunMoment = Literal["optimizer step", "evaluation", "training", "save", "resume"]  # in this order

_PLANNED: dict[RunMoment, tuple[Moment, ...]] = {
    "optimizer step": ("optimizer step",),
    "evaluation": ("evaluation", "generation"),
    "training": ("forward", "backward"),
    "save": ("save",),
    "resume": ("resume",),
}  # the moments of a plan that each of them covers

_REMEDIES: dict[RunMoment, str] = {
    "optimizer step": "Use an optimizer with smaller states"
    f" ({advice.EIGHT_BIT_ADAMW.flag(Door.TRAINER)}, {advice.ADAFACTOR.flag(Door.TRAINER)}),"
    " adapters, or shard them (FSDP2, ZeRO)",
    "evaluation": f"Try: {advice.SMALLER_EVAL_BATCH.flag(Door.TRAINER)}; if outputs pile up,"
    f" {advice.OUTPUTS_TO_MAIN_MEMORY.flag(Door.TRAINER)} or"
    f" {advice.ARGMAX_LOGITS.flag(Door.CODE)}",
    "training": f"Try: {advice.CHECKPOINTING.flag(Door.TRAINER)};"
    f" {advice.SMALLER_MICRO_BATCH.flag(Door.TRAINER)}; {advice.SHORTER_ROWS.flag(Door.CODE)}; or"
    f" {advice.SURVIVE.flag(Door.CODE)}, which divides what does not fit",
    "save": "Save without a second copy on the card:"
    f" {advice.MERGE_IN_MAIN_MEMORY.flag(Door.CODE)}; under FSDP"
    f" {advice.SHARDED_SAVE.flag(Door.ACCELERATE)}; under ZeRO-3"
    f" {advice.SAVE_WITHOUT_GATHER.flag(Door.DEEPSPEED)}",
    "resume": "Load the checkpoint into main memory"
    f" ({advice.LOAD_INTO_MAIN_MEMORY.flag(Door.CODE)}), and move it part by part",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """Tells how one moment went on this rank."""

    moment: RunMoment
    what: str  # what was computed, as in "8 longest rows"
    seconds: float
    peak_bytes: int | None  # None if nothing counts it, or if the moment did not fit
    failure: str = ""  # what failed, on this rank or on another one; empty if nothing did
    has_run_out: bool = False  # whether it failed because it does not fit


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalReport:
    """Tells how the moments of a run went, and what was left out."""

    moments: tuple[Rehearsed, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()  # what was not rehearsed, each with the reason
    total_bytes: int | None = None  # the size of the card; None if nothing counts its memory
    seconds: float = 0.0
    plan: MemoryPlan | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        found = [self._judged(each) for each in self.moments if each.failure]
        if self.left_out:
            found.append(
                Finding(
                    code="rehearsal-left-out",
                    severity=Severity.INFO,
                    summary="not rehearsed: " + ", ".join(what for what, _ in self.left_out),
                    evidence="; ".join(f"{what}: {why}" for what, why in self.left_out),
                    remedy="What these need stays unknown until they run",
                )
            )
        if done := [f"{each.moment} {self._peak(each)}" for each in self.moments]:
            found.append(
                Finding(
                    code="rehearsed",
                    severity=Severity.INFO,
                    summary=f"rehearsed before step 1, in {self.seconds:.1f} s",
                    evidence=", ".join(done),
                    remedy="No action needed: everything is restored",
                )
            )
        return tuple(found)

    def __str__(self) -> str:
        card = f" of {size(self.total_bytes)}" if self.total_bytes else ""
        lines = [f"rehearsed before step 1, in {self.seconds:.1f} s; peaks{card}"]
        for each in self.moments:
            planned_bytes = self._planned_bytes(each.moment)
            planned = "" if planned_bytes is None else f"planned {size(planned_bytes)}"
            what = each.failure or each.what
            lines.append(f"  {each.moment:<14}  {self._peak(each):<12}  {planned:<18}  {what}")
        lines += [f"  {what:<14}  not rehearsed: {why}" for what, why in self.left_out]
        return "\n".join(printable(line.rstrip()) for line in lines)

    def _peak(self, each: Rehearsed) -> str:
        if each.failure:
            return "does not fit" if each.has_run_out else "fails"
        return "fits" if each.peak_bytes is None else size(each.peak_bytes)

    def _planned_bytes(self, moment: RunMoment) -> int | None:
        moments = {} if self.plan is None else self.plan.moments
        peaks = [moments[name].allocated_bytes for name in _PLANNED[moment] if name in moments]
        return max(peaks, default=None)

    def _judged(self, each: Rehearsed) -> Finding:
        card = f" on a card of {size(self.total_bytes)}" if self.total_bytes else ""
        if each.has_run_out:
            return Finding.error(
                code="rehearsal-does-not-fit",
                summary=f"{each.moment} does not fit{card}: the run will end there",
                evidence=f"{each.what}: {each.failure}",
                remedy=_REMEDIES[each.moment],
            )
        return Finding.warning(
            code="rehearsal-fails",
            summary=f"{each.moment} raises when it is rehearsed, and may do so in the run",
            evidence=f"{each.what}: {each.failure}",
            remedy="Read the error; it is harmless if it comes from a row that no sampler draws, or"
            " from a Trainer that needs an earlier step",
        )
