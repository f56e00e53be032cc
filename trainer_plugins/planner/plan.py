"""Define MemoryPlan: the predicted memory of a run, as a value."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Literal, get_args

from trainer_plugins.accumulation import Accumulation

Moment = Literal[
    "load", "forward", "backward", "optimizer step", "evaluation", "generation", "save", "resume"
]  # of a run

# The use of memory, in the breakdown at the peak.
Category = Literal[
    "weights", "frozen weights", "gradients", "optimizer states", "activations",
    "autocast copies of weights", "logits and loss", "KV cache", "sharding buffers", "vLLM",
    "workspaces",
]  # fmt: skip

MOMENTS: tuple[Moment, ...] = get_args(Moment)  # in the order of a run


def peak_until_resume(peaks: Mapping[Moment, int]) -> int:
    """Return the highest peak of a run that is never resumed."""
    return max((peak for moment, peak in peaks.items() if moment != "resume"), default=0)


class PlanError(ValueError):
    """Says in one line why there is no plan for this input."""


RUN_IT = "plan your script instead, with plan -- COMMAND"


class NotPredicted(PlanError):  # noqa: N818 - what it says
    """Names the part of a valid input whose memory the planner cannot predict."""

    def __str__(self) -> str:
        return f"a plan cannot predict {super().__str__()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorsAtPeak:
    """Describes equal storages at the peak: one size, one use, one part of the model."""

    count: int
    num_bytes: int  # the size of each
    category: Category
    part: str  # the part of the model without layer numbers: `mlp`, `lm_head`; empty if none
    operation: str  # the line that allocated it, `train.py:9 loss`
    moment: Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentPeak:
    """Holds the peaks at one moment, or on one card. Sizes in bytes."""

    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Describes a change that should make a run fit. Sizes in bytes, for one card.

    The effective batch stays the same.
    """

    changes: tuple[str, ...]  # what changes, in words: "checkpointing"
    price: str
    flags: str  # what to add to the plan's command; if a flag is given twice, the last one counts
    in_the_run: str = ""  # the same for your script, `exec` or the launcher
    micro_batch: int  # rows of one forward pass on one card (`per_device_train_batch_size`)
    accumulation_steps: int
    sequence_length: int
    reserved_peak_bytes: int
    nvidia_smi_peak_bytes: int
    margin_bytes: int
    host_ram_bytes_per_node: int


def part_of(module: str) -> str:
    """Return the name after a layer's number; without a number, the last name.

    >>> part_of("base_model.model.layers.3.mlp.gate_proj.lora_A.default"), part_of("model.norm")
    ('mlp', 'norm')
    """
    names = module.split(".")
    numbers = [at for at, name in enumerate(names) if name.isdigit()]
    if not numbers:
        return names[-1]
    return names[numbers[0] + 1] if numbers[0] + 1 < len(names) else names[numbers[0] - 1]


# PCIe 4.0 x16, pinned: nvbandwidth on an A100 (forums.developer.nvidia.com/t/352186)
BUS_BYTES_PER_SECOND = 25_000_000_000


def describe_least_seconds(copy_seconds: float) -> str:
    """Say how long a step takes at least because of its copies over the bus."""
    rate = f"{BUS_BYTES_PER_SECOND / 1e9:.0f} GB/s (PCIe 4.0 x16; 5.0 has twice that)"
    digits = 1 if copy_seconds >= 1 else 3
    return f"at least {copy_seconds:.{digits}f} s per step at {rate}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """Describes a streamed frozen base. Sizes in bytes, for one card."""

    num_layers: int
    resident_layers: int  # how many of them are on the card
    num_bytes: int  # the weights kept in main memory
    copied_bytes_per_micro_batch: int  # over the bus, in its forward and backward pass
    copied_bytes_per_step: int
    copy_seconds_per_step: float  # at `BUS_BYTES_PER_SECOND`


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Holds the predicted memory of a run. Sizes in bytes, for one card unless stated otherwise."""

    json_properties: ClassVar[tuple[str, ...]] = ("margin_bytes",)

    allocated_peak_bytes: int  # the predicted `max_memory_allocated`
    # the predicted `max_memory_reserved`; if the run does not fit, that on an unlimited card
    reserved_peak_bytes: int
    nvidia_smi_peak_bytes: int  # the peak in nvidia-smi: reserved memory and the context
    host_ram_bytes_per_node: int  # the peak of all ranks' tensors in a node's main memory
    host_pinned_bytes_per_node: int = 0  # the part of them that is pinned
    host_process_bytes_per_node: int = 0  # Python and its libraries, in all ranks of a node
    # the peak of the tensors in main memory by moment, for the moments that add some
    host_moments: Mapping[Moment, int] = field(default_factory=dict)
    host_capacity_bytes: int | None = None  # the main memory of a node; None if unknown
    host_shortage: str | None = None  # the shortage of main memory, in words
    capacity_bytes: int | None = None  # the memory of the card; None if no card was named
    # whether the run completes on that card and in that main memory; None if neither is known
    fits: bool | None = None
    moment: Moment  # the moment of the allocated peak
    breakdown: Mapping[Category, int]  # at the allocated peak; adds up to it
    moments: Mapping[Moment, MomentPeak]  # the peak of each moment of the run
    # the smallest card on which the run completes, by flushing its cache; None if unknown
    smallest_card_bytes: int | None = None
    fails_on_less: str | None = None  # the line whose allocation fails on a smaller card
    num_flushes: int = 0  # how often a full card flushes its cache (`num_alloc_retries`)
    failed_request_bytes: int | None = None  # size of the failing allocation; None if the run fits
    failed_request: str | None = None  # its operation, module and moment
    not_reliable: tuple[str, ...] = ()  # figures that are less reliable than usual, and why
    assumptions: tuple[str, ...] = ()  # made by the planner where the input is silent
    known_error: str = ""  # how far earlier plans were from measurements
    gpu: str | None = None  # the name of the card; None if no card was named
    num_gpus: int = 1  # cards that train together, or processes if each has several cards
    # the peaks of each card of a multi-card process, by index; all else describes the fullest
    cards: tuple[MomentPeak, ...] = ()
    context_bytes: int = 0  # the part of `nvidia_smi_peak_bytes` outside torch's allocator
    num_parameters: int = 0
    num_trainable_parameters: int = 0
    # torch, transformers and other packages used in the dry run
    versions: Mapping[str, str] = field(default_factory=dict)
    # in order, each the maximum over up to a few hundred events: moment, allocated, reserved bytes
    timeline: tuple[tuple[Moment, int, int], ...] = ()
    groups_at_peak: tuple[TensorsAtPeak, ...] = ()  # the largest tensors, equal ones as one entry
    # the planned run, by name: the model, rows, length, dtype, optimizer, launch, command
    planned: Mapping[str, str] = field(default_factory=dict)
    # the effect of more, smaller micro-batches on the gradient; None in plans of older versions
    accumulation: Accumulation | None = None
    streamed: Streamed | None = None  # the streamed frozen base, if there is one
    # changes with which the run would fit, if asked for; the cheapest first
    proposals: tuple[Proposal, ...] = ()
    tried_without_success: tuple[str, ...] = ()  # changes, each with the memory still missing

    @property
    def loaded_bytes(self) -> int | None:
        """Return the memory of the models before training, without an engine's share of the GPU."""
        load = self.moments.get("load")
        return load.allocated_bytes - self.breakdown.get("vLLM", 0) if load is not None else None

    @property
    def fits_card(self) -> bool | None:
        """Return whether the card holds the run; None if no card was named."""
        if self.capacity_bytes is None:
            return None
        least = self.smallest_card_bytes or 0
        return self.failed_request_bytes is None and least <= self.capacity_bytes

    @property
    def host_bytes_per_node(self) -> int:
        """Return the peak main memory of a node: tensors, Python and its libraries."""
        return self.host_ram_bytes_per_node + self.host_process_bytes_per_node

    @property
    def needed_bytes(self) -> int:
        """Return the smallest sufficient card, context included: a full card flushes its cache."""
        return self.smallest_card_bytes or self.nvidia_smi_peak_bytes

    @property
    def margin_bytes(self) -> int | None:
        """Return the memory left on the card, negative if short; None without a card."""
        return None if self.capacity_bytes is None else self.capacity_bytes - self.needed_bytes

    def count_needed(self, proposal: Proposal) -> int:
        """Return the smallest sufficient card with a proposal that was made for the plan's card."""
        return (self.capacity_bytes or 0) - proposal.margin_bytes

    def to_json(self) -> str:
        """Write the plan as one JSON object, with flat keys named after the fields."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "MemoryPlan":
        """Parse the output of `to_json` or `trainer-plugins plan --json`.

        Raises:
            ValueError: the text is not the JSON of a plan.
        """
        from trainer_plugins.record.folder import from_json

        try:
            return from_json(cls, json.loads(text))
        except TypeError as error:
            raise ValueError(f"not a memory plan: {error}") from error
