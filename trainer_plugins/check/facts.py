"""Facts: all that the checks judge, as values. `gather_here` and `gather_trainer` collect them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainer_plugins.allocator.machine import Machine
from trainer_plugins.allocator.variables import Variables
from trainer_plugins.devices import GpuProcess, HostFacts
from trainer_plugins.finding import Finding
from trainer_plugins.launch.extensions import ExtensionLock
from trainer_plugins.launch.lint import Document
from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.reading import MemoryReading
from trainer_plugins.strategy import Strategy

MUCH = 0.1
"""A part of what is there that is worth a warning."""

LITTLE = 0.01
"""A part of what is there below which nothing is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Describes a process that holds memory on a card."""

    process: GpuProcess
    command: str = ""
    """Its command line; empty if the system does not know the process."""

    is_orphan: bool = False
    """Whether the same user started it, and what started it is gone."""

    is_peer: bool = False
    """Whether it is another rank of this run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """Describes one card of this machine."""

    uuid: str
    name: str = ""
    """What its maker calls it."""

    slices: tuple[str, ...] = ()
    """The UUIDs of its MIG slices."""

    reading: MemoryReading | None = None
    """Its memory; None if the driver does not answer."""

    owners: tuple[Owner, ...] | None = None
    """Who holds memory on it; None if the driver does not tell."""

    capability: tuple[int, int] | None = None
    """The compute capability; None if unknown, or no NVIDIA card."""

    trouble: str = ""
    """Why the driver does not answer for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MainMemory:
    """Describes the main memory of this machine. Sizes in bytes."""

    reading: MemoryReading
    """As the kernel's OOM killer counts it: of the container, if that has less."""

    machine_bytes: int
    shared: HostFacts
    swap_bytes: int = 0
    swap_used_bytes: int = 0
    memlock_bytes: int | None = None
    """How much a process may lock; None: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Describes what surrounds a launch: variables, versions, the launch file."""

    variables: Variables
    """The settings of the allocator."""

    machine: Machine
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES; None if it is not set."""

    card_order: str = ""
    """CUDA_DEVICE_ORDER."""

    switches: Mapping[str, str] = field(default_factory=dict)
    """Variables for debugging that cost memory or time, as far as they are set."""

    versions: Mapping[str, str] = field(default_factory=dict)
    locks: tuple[ExtensionLock, ...] = ()
    document: Document | None = None
    """The launch file, if one was named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Holds the sizes of a model that make memory grow with length."""

    vocab_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherModel:
    """Describes a model that is alive beside the one that is trained."""

    name: str
    """Its class."""

    holder: str
    """What holds it."""

    num_bytes: int
    """Its parameters on the training device, without those that it shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Describes the model in training as its objects show it. Sizes in bytes, on this rank."""

    name: str
    shape: Shape | None = None
    predicts_tokens: bool = False
    """Whether its loss takes a number for each token and word of the vocabulary."""

    makes_no_logits: bool = False
    """Whether a fused loss replaces them."""

    trainable_bytes: Mapping[str, int] = field(default_factory=dict)
    """By dtype."""

    frozen_bytes: Mapping[str, int] = field(default_factory=dict)
    homes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of parameters by the type of device."""

    others: tuple[OtherModel, ...] = ()
    not_live: str = ""
    """Why activations are kept although checkpointing was asked for; empty if nothing is wrong."""

    is_cut_off: bool = False
    """Whether reentrant checkpointing gets inputs that need no gradient."""

    attention: str = ""
    """The implementation that its config names: sdpa, eager."""

    takes_sdpa: bool = False
    uses_cache: bool = False
    """Whether a training forward returns keys and values of each layer."""

    optimizer: str = ""
    """The class of the optimizer."""

    optimizer_state_bytes: int = 0
    """What its states take already, as after a resume."""

    stray_bytes: int = 0
    """What the optimizer updates that is no part of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """Describes a bounded sample of the rows that are trained on."""

    lengths: tuple[int, ...] = ()
    """Tokens of each row that was looked at; of one that is padded, without padding."""

    num_rows: int | None = None
    """The rows of the data set; None if it does not tell."""

    pads_in_rows: int = 0
    """Padding tokens in the rows that were looked at."""

    is_packed: bool = False
    """Whether batches have no padding: the collator joins rows."""

    batch_bytes: int = 0
    """The tensors of the batch of the longest rows that were looked at."""

    collator_error: str = ""
    """What the collator raised for that batch."""

    unseen: str = ""
    """Why no rows were looked at."""

    longest_target: int = 0
    """The tokens of a row for which logits are made: of its labels in an encoder-decoder."""

    longest_evaluation: int = 0
    """The same, for the rows of the evaluation."""

    num_evaluation_rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Holds TrainingArguments by name, and what the Trainer was given beside them."""

    values: Mapping[str, object]
    has_metrics: bool = False
    """Whether there is a `compute_metrics`."""

    reduces_logits: bool = False
    """Whether there is a `preprocess_logits_for_metrics`."""

    logits_to: str = ""
    """Where an EvaluationGuard puts logits that do not fit: cpu, argmax; empty if it does not."""

    num_cards: int | None = None
    """The cards that this process uses; more than one is DataParallel. None before the launch."""

    local_ranks: int = 1
    """The ranks on this machine."""

    strategy: Strategy | None = None
    """What really runs."""

    gathers_on_save: str = ""
    """What gathers all weights on the first rank to save them; empty if nothing does."""

    folder_trouble: str = ""
    """Why nothing can be written to the output directory."""

    disk_free_bytes: int | None = None
    """What is free where it lies."""

    def flag(self, name: str) -> bool:
        """Return whether an argument is set to something."""
        value = self.values.get(name)
        return bool(value) and str(getattr(value, "value", value)).lower() not in ("no", "false")

    def number(self, name: str, default: int) -> int:
        """Return an argument that is a whole number."""
        value = self.values.get(name)
        return int(value) if isinstance(value, (int, float)) else default

    @property
    def vllm_share(self) -> float:
        """Return the part of the card that vLLM takes beside the training, asleep or not."""
        if not self.flag("use_vllm") or self.values.get("vllm_mode") == "server":
            return 0.0
        value = self.values.get("vllm_gpu_memory_utilization")
        return float(value) if isinstance(value, (int, float)) else 0.3

    @property
    def evaluates(self) -> bool:
        """Return whether the run evaluates."""
        return self.flag("eval_strategy") or self.flag("do_eval")

    @property
    def saves(self) -> bool:
        """Return whether the run saves; it does unless told not to."""
        return self.values.get("save_strategy") is None or self.flag("save_strategy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Holds everything that is known before step 1; None stands for what nobody asked about."""

    cards: tuple[CardFacts, ...] = ()
    no_cards: str = ""
    """Why there are none."""

    driver_trouble: str = ""
    """Why the driver that is there does not answer."""

    own_pids: frozenset[int] = frozenset()
    """The processes of this run on this machine; empty before the launch."""

    device_bytes: int | None = None
    """The memory of the device that is trained on."""

    device_free_bytes: int | None = None
    """What of it is free, or cached by this process."""

    capability: tuple[int, int] | None = None
    """Its compute capability; None if unknown, or not CUDA."""

    main: MainMemory | None = None
    environment: Environment | None = None
    model: ModelFacts | None = None
    data: DataFacts | None = None
    run: RunSettings | None = None
    plan: MemoryPlan | None = None
    streamed_plan: MemoryPlan | None = None
    """The plan of the same run with its frozen base streamed, if the run does not fit."""

    no_plan: str = ""
    """Why there is no plan, if one was asked for."""

    failed: tuple[str, ...] = ()
    """What could not be looked at, each with the reason."""


@dataclass(frozen=True, slots=True)
class Line:
    """Holds what one check saw, and what it found."""

    name: str
    seen: str
    """What was looked at, in a few words; shown where nothing was found."""

    findings: tuple[Finding, ...] = ()


def folder_of(values: Mapping[str, object]) -> Path:
    """Return the output directory of a run."""
    return Path(str(values.get("output_dir") or "trainer_output"))
