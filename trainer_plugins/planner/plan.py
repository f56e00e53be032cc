"""Define MemoryPlan: what a run is predicted to need, as a value."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Literal, get_args

from trainer_plugins.accumulation import Accumulation

Moment = Literal[
    "load",
    "forward",
    "backward",
    "optimizer step",
    "evaluation",
    "generation",
    "save",
    "resume",
]  # of a run

Category = Literal[
    "weights",
    "frozen weights",
    "gradients",
    "optimizer states",
    "activations",
    "autocast copies of weights",
    "logits and loss",
    "KV cache",
    "sharding buffers",
    "vLLM",
    "workspaces",
]  # what memory is used for, in the breakdown at the peak

MOMENTS: tuple[Moment, ...] = get_args(Moment)  # in the order in which a run has them


def peak_until_resume(peaks: Mapping[Moment, int]) -> int:
    """Return the highest peak of a run that is never resumed."""
    return max((peak for moment, peak in peaks.items() if moment != "resume"), default=0)


class PlanError(ValueError):
    """Says in one line why there is no plan for this input."""


class NotPredicted(PlanError):  # noqa: N818 - what it says
    """Names the part of a sound input whose memory the planner cannot predict."""

    def __init__(self, what: str) -> None:
        super().__init__(f"not predicted: {what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorsAtPeak:
    """Describes equal storages at the peak: one size, one use, one part of the model."""

    count: int
    num_bytes: int  # the size of each
    category: Category
    part: str  # the part of the model without layer numbers: `mlp`, `lm_head`; empty if none
    operation: str  # the line that made it, `train.py:9 loss`
    moment: Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentPeak:
    """Holds the peaks of one moment, or of one card. Sizes in bytes."""

    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Describes a change that is predicted to make a run fit. Sizes in bytes, for one card.

    The effective batch stays the same.
    """

    changes: tuple[str, ...]  # what changes, in words: "1 row x 16", "checkpointing"
    price: str
    flags: str  # what to add to the plan's command; if a flag is given twice, the last one counts
    in_the_run: str = ""  # the same as your script, `exec` or the launcher take it
    micro_batch: int  # rows of one forward pass on one card (`per_device_train_batch_size`)
    accumulation_steps: int
    sequence_length: int
    reserved_peak_bytes: int
    nvidia_smi_peak_bytes: int
    margin_bytes: int
    host_ram_bytes_per_node: int


def part_of(module: str) -> str:
    """Return what follows the number of a layer; without one, the last name.

    >>> part_of("base_model.model.layers.3.mlp.gate_proj.lora_A.default"), part_of("model.norm")
    ('mlp', 'norm')
    """
    names = module.split(".")
    numbers = [at for at, name in enumerate(names) if name.isdigit()]
    if not numbers:
        return names[-1]
    return names[numbers[0] + 1] if numbers[0] + 1 < len(names) else names[numbers[0] - 1]


# PCIe 4.0 x16, pinned: an A100 by nvbandwidth (forums.developer.nvidia.com/t/352186)
BUS_BYTES_PER_SECOND = 25_000_000_000


def describe_least_seconds(copy_seconds: float) -> str:
    """Say how long a step takes at least because of its copies over the bus."""
    rate = f"{BUS_BYTES_PER_SECOND / 1e9:.0f} GB/s (PCIe 4.0 x16; 5.0 has twice that)"
    digits = 1 if copy_seconds >= 1 else 3
    return f"at least {copy_seconds:.{digits}f} s a step at {rate}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """Describes a frozen base that is streamed. Sizes in bytes, for one card."""

    num_layers: int
    resident_layers: int  # how many of them are on the card
    num_bytes: int  # the weights that wait in main memory
    copied_bytes_per_micro_batch: int  # what its forward and backward copy over the bus
    copied_bytes_per_step: int
    copy_seconds_per_step: float  # how long that takes at `BUS_BYTES_PER_SECOND`


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Holds what a run is predicted to need. Sizes in bytes, for one card unless stated otherwise.

    Everything is predicted, without a card.
    """

    json_properties: ClassVar[tuple[str, ...]] = ("margin_bytes",)

    allocated_peak_bytes: int  # what `max_memory_allocated` will return
    # what `max_memory_reserved` will return; of a run that does not fit, on an unlimited card
    reserved_peak_bytes: int
    nvidia_smi_peak_bytes: int  # what the driver will show: reserved memory and the context
    host_ram_bytes_per_node: int  # the peak of all ranks' tensors in a node's main memory
    host_pinned_bytes_per_node: int = 0  # the part of them that is pinned
    host_process_bytes_per_node: int = 0  # of Python and its libraries, in all ranks of a node
    # the peak of the tensors in main memory by moment, for the moments that add some
    host_moments: Mapping[Moment, int] = field(default_factory=dict)
    host_capacity_bytes: int | None = None  # the main memory of a node; None if unknown
    host_shortage: str | None = None  # what does not fit in main memory, in words
    capacity_bytes: int | None = None  # the memory of the card; None if no card was named
    # whether the run completes on that card and in that main memory; None if neither is known
    fits: bool | None = None
    moment: Moment  # the moment of the allocated peak
    breakdown: Mapping[Category, int]  # at the allocated peak; adds up to it
    moments: Mapping[Moment, MomentPeak]  # the peak of each moment of the run
    # the smallest card on which the run completes, by releasing its cache; None if unknown
    smallest_card_bytes: int | None = None
    fails_on_less: str | None = None  # the line whose request fails on a smaller card
    num_flushes: int = 0  # how often a full card releases its cache (`num_alloc_retries`)
    failed_request_bytes: int | None = None  # of the allocation that fails; None if the run fits
    failed_request: str | None = None  # its operation, module and moment
    not_reliable: tuple[str, ...] = ()  # figures that are less reliable than usual, and why
    assumptions: tuple[str, ...] = ()  # of the planner, where the input says nothing
    known_error: str = ""  # how far earlier plans were from measured figures
    gpu: str | None = None  # the name of the card; None if no card was named
    num_gpus: int = 1  # cards that train together, or processes if each has several cards
    # the peaks of each card of a process with several, by index; all else is of the fullest
    cards: tuple[MomentPeak, ...] = ()
    context_bytes: int = 0  # the part of `nvidia_smi_peak_bytes` that is outside torch's allocator
    num_parameters: int = 0
    num_trainable_parameters: int = 0
    # of torch, transformers and other packages that the run was rehearsed with
    versions: Mapping[str, str] = field(default_factory=dict)
    # in order, each the maximum of up to some hundred events: moment, allocated, reserved bytes
    timeline: tuple[tuple[Moment, int, int], ...] = ()
    groups_at_peak: tuple[TensorsAtPeak, ...] = ()  # what takes most, equal tensors as one entry
    # what was planned, by name: the model, rows, length, dtype, optimizer, launch, command
    planned: Mapping[str, str] = field(default_factory=dict)
    # what more micro-batches of fewer rows do to the gradient; None if an older version planned
    accumulation: Accumulation | None = None
    streamed: Streamed | None = None  # how the frozen base is streamed, if it is
    # changes with which the run would fit, if asked for; the least costly first
    proposals: tuple[Proposal, ...] = ()
    tried_without_success: tuple[str, ...] = ()  # changes, each with what is missing

    @property
    def loaded_bytes(self) -> int | None:
        """Return what the models take before they train, without an engine's share of the card."""
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
        """Return what a node needs of its main memory: tensors, Python and its libraries."""
        return self.host_ram_bytes_per_node + self.host_process_bytes_per_node

    @property
    def needed_bytes(self) -> int:
        """Return what a card has to have, context included: one that is full releases its cache."""
        return self.smallest_card_bytes or self.nvidia_smi_peak_bytes

    @property
    def margin_bytes(self) -> int | None:
        """Return what the card has beside that, negative if short; None without a card."""
        return None if self.capacity_bytes is None else self.capacity_bytes - self.needed_bytes

    def count_needed(self, proposal: Proposal) -> int:
        """Return what a card has to have with a proposal for the one that is named."""
        return (self.capacity_bytes or 0) - proposal.margin_bytes

    def to_json(self) -> str:
        """Write the plan as one JSON object, with flat keys named after the fields."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "MemoryPlan":
        """Read what `to_json` or `trainer-plugins plan --json` wrote.

        Raises:
            ValueError: the text is not the JSON of a plan.
        """
        from trainer_plugins.record.folder import from_json

        try:
            return from_json(cls, json.loads(text))
        except TypeError as error:
            raise ValueError(f"not a memory plan: {error}") from error
