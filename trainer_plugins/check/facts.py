"""Facts: the input of all checks, as values. The `gather_` modules collect them."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from trainer_plugins.accumulation import Accumulation
from trainer_plugins.allocator.machine import Machine
from trainer_plugins.devices import GpuProcess, HostFacts
from trainer_plugins.devices.nvml import InstalledCard
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.launch.extensions import ExtensionLock
from trainer_plugins.launch.lint.document import Document
from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.reading import MemoryReading
from trainer_plugins.strategy import Strategy

T = TypeVar("T")

logger = logging.getLogger(__name__)

MUCH = 0.1  # warn from this fraction of the available memory on
LITTLE = 0.01  # below this fraction of the available memory, say nothing


class Owner(NamedTuple):
    """Describes a process that holds memory on a card."""

    process: GpuProcess
    command: str = ""  # its command line; empty if the system does not know the process
    is_orphan: bool = False  # whether the same user started it, and its launcher is gone
    is_peer: bool = False  # whether it is another rank of this run


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts(InstalledCard):
    """Describes one card of this machine, and the processes on it."""

    reading: MemoryReading | None = None  # its memory; None if the driver does not answer
    owners: tuple[Owner, ...] | None = None  # who holds memory on it; None if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class MainMemory:
    """Describes the main memory of this machine. Sizes in bytes."""

    reading: MemoryReading  # within the container's limit, as the kernel's OOM killer counts it
    machine_bytes: int
    shared: HostFacts
    swap_bytes: int = 0
    swap_used_bytes: int = 0
    memlock_bytes: int | None = None  # how much a process may lock; None: no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Holds the sizes of a model that make memory grow with length."""

    vocab_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_size: int

    def cache_bytes_a_token(self, width: int) -> int:
        """Return the size of the keys and values of all layers, of `width` bytes each number."""
        return 2 * self.num_layers * self.num_key_value_heads * self.head_size * width

    @classmethod
    def read(cls, config: Mapping[str, object]) -> "ModelShape | None":
        """Read the config of a language model, or of such a part of one; None if there is none.

        >>> ModelShape.read({"vocab_size": 8, "n_layer": 2, "n_head": 4, "n_embd": 64})
        ModelShape(vocab_size=8, num_layers=2, num_heads=4, num_key_value_heads=4, head_size=16)
        """
        if isinstance(inner := config.get("text_config"), Mapping):
            return cls.read(inner)

        def number(*names: str, default: int = 0) -> int:
            values = map(config.get, names)
            return next((each for each in values if isinstance(each, int)), default)

        vocabulary = number("vocab_size")
        layers = number("num_hidden_layers", "n_layer", "num_layers")
        heads = number("num_attention_heads", "n_head", "num_heads")
        if not (vocabulary and layers and heads):
            return None
        width = number("hidden_size", "n_embd", "d_model")
        return cls(
            vocab_size=vocabulary,
            num_layers=layers,
            num_heads=heads,
            num_key_value_heads=number("num_key_value_heads", default=heads),
            head_size=number("head_dim", "d_kv", default=width // heads),
        )


def predicts_tokens(name: str) -> bool:
    """Return whether a class of this name has a loss over all words of its vocabulary."""
    return any(part in name for part in ("CausalLM", "ConditionalGeneration", "LMHead", "MaskedLM"))


class OtherModel(NamedTuple):
    """Describes a model that is alive in addition to the one in training."""

    name: str  # its class
    holder: str  # the variable or object that holds it
    num_bytes: int  # its parameters on the training device, without shared ones


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Describes the model in training, read from its objects. Sizes in bytes, on this rank."""

    shape: ModelShape | None = None
    predicts_tokens: bool = False  # whether its loss needs a logit for each token and word
    makes_no_logits: bool = False  # whether a fused loss avoids them
    trainable_bytes: Mapping[str, int] = field(default_factory=dict)  # by dtype
    frozen_bytes: Mapping[str, int] = field(default_factory=dict)
    expert_bytes: int = 0  # of experts stacked in one tensor per layer, which is not quantised
    homes: Mapping[str, int] = field(default_factory=dict)  # by device type
    others: tuple[OtherModel, ...] = ()
    is_checkpointing: bool = False  # whether any of its modules has checkpointing switched on
    is_cut_off: bool = False  # whether reentrant checkpointing gets inputs that need no gradient
    attention: str = ""  # the attention implementation in its config: sdpa, eager
    takes_sdpa: bool = False
    uses_cache: bool = False  # whether its training forward returns keys and values of each layer
    optimizer: str = ""  # the class of the optimizer
    optimizer_state_bytes: int = 0  # the size of its existing states, for example after a resume
    stray_bytes: int = 0  # tensors that the optimizer updates but the model does not have


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """Describes a bounded sample of the training rows."""

    lengths: tuple[int, ...] = ()  # tokens in each sampled row, without padding
    num_rows: int | None = None  # the rows of the data set; None if unknown
    pads_in_rows: int = 0  # padding tokens in the sampled rows
    is_packed: bool = False  # whether batches have no padding, because the collator joins rows
    batch_bytes: int = 0  # the size of a batch of the longest sampled rows
    batch_names: tuple[str, ...] | None = None  # the names in it; None if no batch could be made
    collator_error: str = ""  # the collator's error for that batch
    unseen: str = ""  # why no rows could be sampled
    longest_target: int = 0  # the most tokens of a row that get logits: of labels, if they differ
    longest_evaluation: int = 0  # the same for the evaluation
    num_evaluation_rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Holds TrainingArguments by name, and the Trainer's other arguments."""

    values: Mapping[str, object] = field(default_factory=dict)
    has_metrics: bool = False  # whether there is a `compute_metrics`
    reduces_logits: bool = False  # whether there is a `preprocess_logits_for_metrics`
    logits_to: str = ""  # the EvaluationGuard's choice for logits that do not fit: cpu, argmax
    num_cards: int | None = None  # used by this process (DataParallel); None before launch
    local_ranks: int = 1  # the ranks on this machine
    strategy: Strategy | None = None  # the strategy in force; None before the launch
    gathers_on_save: str = ""  # the setting that gathers all weights on the first rank for a save
    folder_trouble: str = ""  # why nothing can be written to the output directory
    disk_free_bytes: int | None = None  # free space on the disk of the output directory

    def flag(self, name: str) -> bool:
        value = self.values.get(name)
        return bool(value) and str(getattr(value, "value", value)).lower() not in ("no", "false")

    def number(self, name: str, default: int) -> int:
        value = self.values.get(name)
        return int(value) if isinstance(value, (int, float)) else default

    @property
    def rows(self) -> int:
        """Return the rows of a micro-batch."""
        return self.number("per_device_train_batch_size", 8)

    @property
    def vllm_share(self) -> float:
        """Return vLLM's share of the training card, asleep or not."""
        if not self.flag("use_vllm") or self.values.get("vllm_mode") == "server":
            return 0.0
        value = self.values.get("vllm_gpu_memory_utilization")
        return float(value) if isinstance(value, (int, float)) else 0.3

    @property
    def evaluates(self) -> bool:
        return self.flag("eval_strategy") or self.flag("do_eval")

    @property
    def saves(self) -> bool:
        return self.values.get("save_strategy") is None or self.flag("save_strategy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Holds everything known before step 1; unknown facts are None or empty."""

    cards: tuple[CardFacts, ...] = ()
    no_cards: str = ""  # why there are none
    driver_trouble: str = ""  # why an installed driver does not answer
    own_pids: frozenset[int] = frozenset()  # of this run on this machine; empty before launch
    device_bytes: int | None = None  # the memory of the training device
    device_free_bytes: int | None = None  # the part of it that is free, or cached by this process
    capability: tuple[int, int] | None = None  # of the training device, if it is CUDA
    main: MainMemory | None = None
    environ: Mapping[str, str] = field(default_factory=dict)  # the variables of a launch
    machine: Machine = field(default_factory=Machine)
    versions: Mapping[str, str] = field(default_factory=dict)  # of packages
    locks: tuple[ExtensionLock, ...] = ()  # of builds of extensions; not read inside a run
    document: Document = field(default_factory=partial(Document, name=""))  # the launch file
    model: ModelFacts = field(default_factory=ModelFacts)
    data: DataFacts = field(default_factory=DataFacts)
    run: RunSettings = field(default_factory=RunSettings)
    accumulation: Accumulation | None = None  # its effect on the gradient; None if unread
    plan: MemoryPlan | None = None
    streamed_plan: MemoryPlan | None = None  # with its frozen base streamed, if it does not fit
    no_plan: str = ""  # why there is no plan, if one was requested
    failed: tuple[str, ...] = ()  # the facts that could not be read, and why

    @property
    def fewer_rows(self) -> str:
        """Suggest fewer rows at once, and the change that this run's loss requires for it."""
        cure = "" if self.accumulation is None else self.accumulation.cure
        return f"fewer rows with more accumulation{f' ({cure})' if cure else ''}"

    @property
    def free_main_bytes(self) -> int | None:
        return None if self.main is None else self.main.reading.free_bytes


@dataclass(frozen=True, slots=True)
class CheckLine:
    """Holds the observation and the findings of one check."""

    name: str
    seen: str  # the observation in a few words; shown if there are no findings
    findings: tuple[Finding, ...] = ()


Check = Callable[[Facts], CheckLine | None]  # None if its facts are unknown


def severity_of(need_bytes: int, free_bytes: int) -> Severity:
    """Return ERROR if a need exceeds the free memory, else WARNING."""
    return Severity.ERROR if need_bytes > free_bytes else Severity.WARNING


def folder_of(values: Mapping[str, object]) -> Path:
    """Return the output directory of a run."""
    return Path(str(values.get("output_dir") or "trainer_output"))


class Notes:
    """Records what failed, so that one failure costs one fact or one check."""

    def __init__(self, failed: Iterable[str] = ()) -> None:
        self.failed = [*failed]

    def try_read(self, what: str, default: T, read: Callable[..., T], *given: object) -> T:
        try:
            return read(*given)
        except Exception as error:
            logger.debug("a fact or a check is missing", exc_info=True)
            self.failed.append(f"{what}: {type(error).__name__}: {error}")
            return default
