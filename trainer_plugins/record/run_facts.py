"""RunFacts: a run's setup, written to its output_dir when it begins: `run.json`, `run-2.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainer_plugins.record.folder import read_all
from trainer_plugins.strategy import Strategy

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Says where a process runs and what limits it there."""

    pid: int
    kernel: str
    """Machine, boot and control group as one name; counts compare only where it is equal."""

    num_oom_kills: int = 0
    """Processes of this container that the kernel had killed for memory so far."""

    main_memory_bytes: int = 0
    """The machine's main memory, or the container's limit if that is lower."""

    shm_bytes: int = 0  # the size of /dev/shm
    limits: Mapping[str, str] = field(default_factory=dict)  # other limits: Slurm's grants, WSL


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Says how the process was launched, without secrets."""

    file: str = ""
    """The launch file of `accelerate launch`; empty if there is none or it is unknown."""

    words: tuple[str, ...] = ()
    """The command line of accelerate, torchrun or DeepSpeed; empty if none started the process."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """What file and flags resulted in: the variables that accelerate passes to its ranks."""

    deepspeed: Mapping[str, object] = field(default_factory=dict)
    """The content of the launch's DeepSpeed file, with each "auto" left in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Holds what an explanation needs to know about a run, without secrets."""

    version: int = VERSION
    process: str  # the process's name in the lines of the timeline
    time_seconds: float  # when the training began, in seconds since the Unix epoch
    step: int  # optimizer steps completed before: 0, unless it resumed
    rank: int
    world_size: int
    command: tuple[str, ...]
    """The command line after `python`, with secrets masked: `-m mine.train`, or a script."""

    launch: Launch | None = None  # how it was launched; None if an earlier version wrote this
    trainer: str = ""  # the class of the Trainer
    model: str = ""  # the class of the model
    built_class: str = ""
    """The class of the model, or of an adapter's base, by its config, with its module:
    `transformers.models.llama.modeling_llama.LlamaForCausalLM`."""

    model_config: Mapping[str, object] = field(default_factory=dict)
    adapter: Mapping[str, object] = field(default_factory=dict)
    """The fields of the PeftConfig; empty without an adapter."""

    dtype: str = ""  # the dtype of the weights when training began: `bfloat16`
    arguments: Mapping[str, object] = field(default_factory=dict)
    """The TrainingArguments, without tokens and keys."""

    override: str = ""
    """The prefix of an override in a Hydra app: `++trainer.args.`; empty without Hydra."""

    num_rows_a_step: int = 0
    """Rows of an optimizer step on all ranks; an epoch's last step may have fewer. 0 is unknown."""

    num_evaluation_batches: int = 0
    """Batches of an evaluation; 0 if there is none or the number is unknown."""

    has_metrics: bool = False
    """Whether the Trainer has a `compute_metrics`, which makes an evaluation keep all outputs."""

    strategy: Strategy | None = None
    """What really runs; None if the run ended before this was known."""

    device: str = ""  # what torch calls the device: `cuda:0`
    card: str = ""  # the product's name
    capability: tuple[int, int] | None = None
    """The compute capability of a CUDA card; None elsewhere."""

    device_bytes: int = 0
    driver: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    allocator: Mapping[str, str] = field(default_factory=dict)
    """The variables with allocator settings, and CUDA_VISIBLE_DEVICES, where set."""

    place: Place | None = None


def read_run_facts(folder: Path) -> list[RunFacts]:
    """Read what the runs of a folder wrote when they began, oldest first, without damaged files."""
    return sorted(read_all(folder, "run", RunFacts), key=lambda facts: facts.time_seconds)
