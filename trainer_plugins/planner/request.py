"""What a prediction is asked for, as a value that goes to the subprocess."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer_plugins.planner.cards import Card
from trainer_plugins.planner.plan import PlanError

DEFAULT_SEQUENCE_LENGTH = 2048
DEFAULT_EVALUATION_BATCHES = 8
LONGEST_SEQUENCE = 1 << 24
"""Tokens of a row: some more than the 10 million of any model's context; what is longer is a slip of the hand."""
MOST_EVALUATION_BATCHES = MOST_ROWS = 1 << 24

OPTIMIZER_STEPS = 3
"""So many are rehearsed. In the first the optimizer makes its states. The second has them, and the
third is the first whose blocks lie where one like it has left them: what is reserved grows until
then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSource:
    """A model by its config, and data by their lengths."""

    config: dict[str, Any]
    """The content of a config.json."""

    arguments: tuple[str, ...] | bytes
    """Flags of TrainingArguments, or their class and fields, pickled."""

    sequence_length: int = DEFAULT_SEQUENCE_LENGTH
    target_length: int | None = None
    """Of the labels of an encoder-decoder; None is the sequence length."""

    dtype: str | None = None
    """In which the weights are loaded; None is what `from_pretrained` chooses."""

    peft: dict[str, Any] | None = None
    """The content of an adapter_config.json."""

    num_evaluation_batches: int = DEFAULT_EVALUATION_BATCHES

    def __post_init__(self) -> None:
        for name, length in (("sequence", self.sequence_length), ("target", self.target_length)):
            if length is not None and not 1 <= length <= LONGEST_SEQUENCE:
                raise PlanError(
                    f"a {name} length is a number of tokens from 1 to {LONGEST_SEQUENCE:,}, got {length:,}"
                )
        if not 1 <= self.num_evaluation_batches <= MOST_EVALUATION_BATCHES:
            raise PlanError(
                f"an evaluation has from 1 to {MOST_EVALUATION_BATCHES:,} batches, got {self.num_evaluation_batches:,}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSource:
    """Somebody's Trainer, with shapes in place of tensors."""

    trainer: bytes
    batch: bytes
    evaluation_batch: bytes | None = None
    num_evaluation_batches: int = 0
    left_out: tuple[str, ...] = ()
    """Attributes of the Trainer that cannot be sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """One prediction."""

    source: ConfigSource | TrainerSource
    device: str = "cuda"
    card: Card | None = None
    allocator: str = ""
    """The text of PYTORCH_ALLOC_CONF."""

    num_gpus: int = 1
    """0: as many as the launch file says."""

    num_nodes: int = 0
    """Machines that these cards are in, as many in each; 0: nobody has said."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """What a launcher exports to its processes, for accelerate."""

    deepspeed: dict[str, Any] | None = None
    """What a launcher configures DeepSpeed with, its "auto" as it is."""

    launch_file: str | None = None
    """accelerate's config file."""

    has_padding: bool | None = None
    """None: batches of more than one row have."""

    is_packed: bool = False
    """Whether several sequences share a row of the batch, told apart by their positions."""

    @property
    def gpus_per_node(self) -> int:
        """Of a request that says both numbers, as `launched.resolved` leaves it."""
        return self.num_gpus // self.num_nodes
