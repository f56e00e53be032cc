"""Define what a search is asked, and what it finds, as values."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from trainer_plugins.planner.cards import Card
from trainer_plugins.planner.compare.switches import as_flags
from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.planner.request import PlanRequest
from trainer_plugins.planner.tried import is_safe

# Shipped launch files, the plainest first; False: no file is needed, the flags alone do it.
ON_ONE_CARD = (("single_device", False), ("one_gpu_7b_offload", True))
ON_MANY = (
    ("ddp", False),
    ("fsdp2", True),
    ("fsdp2_offload", True),
    ("zero2", True),
    ("zero3", True),
    ("zero3_offload_optimizer", True),
    ("zero3_offload_all", True),
)
STREAMED = "stream_base"  # the base of an adapter is streamed; no launch file
WITH_CHECKPOINTING = " with checkpointing"  # ends the name of a way to run
AS_GIVEN = "as given"  # a run that brings its own strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """Describes a search that starts from one run."""

    run: PlanRequest  # the run; its rows and accumulation give the effective batch
    lengths: tuple[int, ...]  # the lengths to try, in tokens

    @property
    def num_ways(self) -> int:
        """Return how many ways to run are tried at most."""
        shipped = ON_ONE_CARD if self.run.num_gpus <= 1 else ON_MANY
        return 2 * len(self.lengths) * (len(shipped) + 1)  # and the base streamed

    @property
    def device(self) -> str:
        """Return the type of device that is planned for."""
        return self.run.device

    @property
    def card(self) -> Card | None:
        """Return the card on which the run has to fit."""
        return self.run.card


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLine:
    """Holds one way to run with the largest micro-batch that fits, or else with the smallest."""

    strategy: str  # the name of a shipped launch file, `STREAMED` or `AS_GIVEN`
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
    in_full: bool  # whether all layers were run; else it is extrapolated
    copy_seconds_per_step: float = 0.0  # at least, of a streamed base
    is_safe: bool = True  # whether it fits even if the plan is as far off as any was

    json_properties: ClassVar[tuple[str, ...]] = ("flags", "hydra_overrides")

    @property
    def micro_batch_tokens(self) -> int:
        """Return the tokens of one forward pass on one card."""
        return self.micro_batch * self.sequence_length

    @property
    def arguments(self) -> dict[str, object]:
        """Return the TrainingArguments that select this way to run."""
        return {
            "per_device_train_batch_size": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation_steps,
            "gradient_checkpointing": self.gradient_checkpointing,
        }

    @property
    def flags(self) -> str:
        """Return the same arguments as flags."""
        return as_flags(self.arguments)

    @property
    def hydra_overrides(self) -> str:
        """Return the same for a Hydra app that has its TrainingArguments at `trainer.args`."""
        return " ".join(
            f"++trainer.args.{name}={str(value).lower()}" for name, value in self.arguments.items()
        )


def line_of(
    plan: MemoryPlan,
    *,
    strategy: str,
    gradient_checkpointing: bool,
    sequence_length: int,
    micro_batch: int,
    rows: int,
    in_full: bool,
) -> SearchLine:
    """Return the line of a plan with this many of `rows` rows at once."""
    return SearchLine(
        strategy=strategy,
        gradient_checkpointing=gradient_checkpointing,
        sequence_length=sequence_length,
        micro_batch=micro_batch,
        accumulation_steps=rows // micro_batch,
        fits=bool(plan.fits),
        allocated_peak_bytes=plan.allocated_peak_bytes,
        reserved_peak_bytes=plan.reserved_peak_bytes,
        nvidia_smi_peak_bytes=plan.nvidia_smi_peak_bytes,
        margin_bytes=plan.margin_bytes or 0,
        host_ram_bytes_per_node=plan.host_ram_bytes_per_node,
        in_full=in_full,
        copy_seconds_per_step=plan.streamed.copy_seconds_per_step if plan.streamed else 0.0,
        is_safe=is_safe(plan),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """Holds what a search had found when it was interrupted."""

    lines: tuple[SearchLine, ...]
    interrupted: Literal[True] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Holds the result of a search."""

    lines: tuple[SearchLine, ...]  # each way to run that was tried, in this order
    # fits, is safe if one is, and has the most tokens; None if nothing fits
    best: SearchLine | None
    best_plan: MemoryPlan | None
    refused: tuple[tuple[str, str], ...]  # ways that cannot be predicted, with the reason
    not_tried: tuple[tuple[str, str], ...] = ()  # ways that cannot be best, with why
    effective_batch: int  # rows between two optimizer steps on all cards, the same in each line
    num_gpus: int
    gpu: str
    capacity_bytes: int
