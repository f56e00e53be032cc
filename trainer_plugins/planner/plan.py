"""MemoryPlan: what a run is predicted to need, as a value."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

MOMENTS = (
    "load",
    "forward",
    "backward",
    "optimizer step",
    "evaluation",
    "generation",
    "save",
    "resume",
)
"""The moments of a run, in their order."""

CATEGORIES = (
    "weights",
    "frozen weights",
    "gradients",
    "optimizer states",
    "activations",
    "autocast copies of weights",
    "logits and loss",
    "KV cache",
    "sharding buffers",
    "workspaces",
)
"""What memory can be, in the breakdown at the peak."""


class PlanError(ValueError):
    """The input cannot be planned for: what is wrong with it, in one line."""


class NotPredicted(PlanError):  # noqa: N818 - what it says
    """The input is sound, and nothing here can say what it will need: its text names what."""

    def __init__(self, what: str) -> None:
        super().__init__(f"not predicted: {what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorAtPeak:
    """One storage that lives at the peak."""

    num_bytes: int
    category: str
    """One of `CATEGORIES`."""

    module: str
    """The module that made it, by its name in the model; empty where none did."""

    operation: str
    """What made it, as torch names it: `aten::mm`."""

    moment: str
    """When it was made, one of `MOMENTS`."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentPeak:
    """The most that one moment holds. Sizes in bytes."""

    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What a run is predicted to need. All sizes in bytes, for one card unless they say otherwise.

    It is a prediction: no card was asked.
    """

    allocated_peak_bytes: int
    """What `max_memory_allocated` will say."""

    reserved_peak_bytes: int
    """What `max_memory_reserved` will say, on the card of `capacity_bytes` if that is enough."""

    nvidia_smi_peak_bytes: int
    """What the driver will show for the process: reserved, and the context."""

    host_ram_bytes_per_node: int
    """Tensors of the run in main memory, at their peak; Python and its libraries come on top."""

    host_pinned_bytes_per_node: int = 0
    capacity_bytes: int | None = None
    """The memory of the card, None where no card was named."""

    fits: bool | None = None
    """Whether the run ends on that card, None where no card was named."""

    moment: str
    """The moment of the allocated peak, one of `MOMENTS`."""

    breakdown: Mapping[str, int]
    """What lives at the allocated peak, by category. The sum is `allocated_peak_bytes`."""

    top_tensors: tuple[TensorAtPeak, ...]
    """The ten largest of them."""

    moments: Mapping[str, MomentPeak]
    """The peak of each moment that the run has."""

    num_flushes: int = 0
    """How often the allocator gives its whole cache back because the card is full (`num_alloc_retries`)."""

    failed_request_bytes: int | None = None
    """The allocation that the card refuses, where the run does not fit."""

    failed_request: str | None = None
    """What asks for it, and when."""

    not_predicted: tuple[str, ...] = ()
    """What the run does that this plan knows nothing about, by name."""

    not_reliable: tuple[str, ...] = ()
    """Which numbers rest on less than usual, and why."""

    assumptions: tuple[str, ...] = ()
    """What was chosen because nobody said it."""

    known_error: str = ""
    device: str = "cuda"
    """The kind of device predicted for: `cuda`, or `simgpu`, the simulated card."""

    gpu: str | None = None
    num_gpus: int = 1
    context_bytes: int = 0
    """Of `nvidia_smi_peak_bytes`, what is not the allocator's."""

    num_parameters: int = 0
    num_trainable_parameters: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    timeline: tuple[tuple[str, int, int], ...] = ()
    """Over the run: moment, and the most of some hundred events in a row, allocated bytes and reserved bytes."""

    @property
    def margin_bytes(self) -> int | None:
        """What is left on the card at the peak; below 0 it is what is missing.

        None where no card was named.
        """
        return (
            None
            if self.capacity_bytes is None
            else self.capacity_bytes - self.nvidia_smi_peak_bytes
        )

    def to_json(self) -> str:
        """The plan as one JSON object, with flat keys named as the fields."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "MemoryPlan":
        """Read what `to_json` wrote.

        Raises:
            ValueError: the text is no such JSON.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            fields["top_tensors"] = tuple(
                TensorAtPeak(**{**tensor, "shape": tuple(tensor["shape"])})
                for tensor in fields["top_tensors"]
            )
            fields["moments"] = {
                name: MomentPeak(**peak) for name, peak in fields["moments"].items()
            }
            for name in ("not_predicted", "not_reliable", "assumptions"):
                fields[name] = tuple(fields[name])
            fields["timeline"] = tuple(
                (moment, now, held) for moment, now, held in fields["timeline"]
            )
            return cls(**fields)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a memory plan: {error}") from error
