"""Define the results of a search as values."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from trainer_plugins.planner.compare.switches import write_flags
from trainer_plugins.planner.plan import MemoryPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLine:
    """Holds one combination of settings with the largest micro-batch that fits, or the smallest."""

    gradient_checkpointing: bool
    sequence_length: int
    micro_batch: int  # rows of one forward pass on one card (`per_device_train_batch_size`)
    accumulation_steps: int
    fits: bool
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    nvidia_smi_peak_bytes: int
    margin_bytes: int
    host_ram_bytes_per_node: int
    is_safe: bool = True  # whether it fits even with the largest known error of a plan

    json_properties: ClassVar[tuple[str, ...]] = ("flags", "hydra_overrides")

    @property
    def arguments(self) -> dict[str, object]:
        """Return the TrainingArguments of this line."""
        return {
            "per_device_train_batch_size": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation_steps,
            "gradient_checkpointing": self.gradient_checkpointing,
        }

    @property
    def flags(self) -> str:
        """Return the same arguments as flags."""
        return write_flags(self.arguments)

    @property
    def hydra_overrides(self) -> str:
        """Return them for a Hydra app that keeps its TrainingArguments at `trainer.args`."""
        return " ".join(
            f"++trainer.args.{name}={str(value).lower()}" for name, value in self.arguments.items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """Holds the lines that a search had found when it was interrupted."""

    lines: tuple[SearchLine, ...]
    interrupted: Literal[True] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Holds the result of a search."""

    lines: tuple[SearchLine, ...]  # every combination that was tried, in order
    # the line that fits with the most tokens, preferably a safe one; None if nothing fits
    best: SearchLine | None
    best_plan: MemoryPlan | None
    effective_batch: int  # rows of an optimizer step over all cards, the same in each line
    num_gpus: int
    gpu: str
    capacity_bytes: int


def all_of(results: Sequence[SearchResult]) -> SearchResult:
    """Join the results for several sequence lengths; the best has the most tokens at once."""

    def rank(result: SearchResult) -> tuple[bool, int]:
        best = result.best
        return (best.is_safe, best.micro_batch * best.sequence_length) if best else (False, 0)

    lines = tuple(line for result in results for line in result.lines)
    return replace(max(results, key=rank), lines=lines)
