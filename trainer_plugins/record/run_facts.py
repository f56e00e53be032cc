"""RunFacts: a run's setup, written to its output_dir when it begins: `run.json`, `run-2.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainer_plugins.accumulation import Accumulation
from trainer_plugins.record.folder import read_all
from trainer_plugins.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Says where a process runs and what limits it there."""

    pid: int
    host: str = ""  # the machine's name; empty if an earlier version wrote this
    job: str = ""  # the scheduler's: `Slurm 4242`; empty without one
    kernel: str  # machine, boot and control group; counts compare only where it is equal
    num_oom_kills: int = 0  # processes of this container killed for main memory so far
    main_memory_bytes: int = 0  # the machine's, or the container's limit if that is lower
    shm_bytes: int = 0  # the size of /dev/shm
    limits: Mapping[str, str] = field(default_factory=dict)  # other limits: Slurm's grants, WSL


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Says how the process was launched, without secrets."""

    file: str = ""  # the launch file of `accelerate launch`; empty if there is none
    words: tuple[str, ...] = ()  # the launcher's command line; empty without a launcher
    environment: Mapping[str, str] = field(default_factory=dict)  # of accelerate, for its ranks
    deepspeed: Mapping[str, object] = field(default_factory=dict)  # its file, each "auto" left in


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Holds what an explanation needs to know about a run, without secrets."""

    version: int = 1
    process: str  # the process's name in the lines of the timeline
    time_seconds: float  # when the training began, in seconds since the Unix epoch
    step: int  # optimizer steps completed before: 0, unless it resumed
    rank: int
    world_size: int
    command: tuple[str, ...]  # what follows `python`, with secrets masked
    launch: Launch | None = None  # how it was launched
    trainer: str = ""  # the class of the Trainer
    model: str = ""  # the class of the model
    built_class: str = ""  # the class that the config builds, or an adapter's base, with its module
    model_config: Mapping[str, object] = field(default_factory=dict)
    adapter: Mapping[str, object] = field(default_factory=dict)  # PeftConfig's fields; or empty
    dtype: str = ""  # the dtype of the weights when training began: `bfloat16`
    arguments: Mapping[str, object] = field(default_factory=dict)  # without tokens and keys
    override: str = ""  # how a Hydra app overrides: `++trainer.args.`; empty without Hydra
    num_rows_a_step: int = 0  # of all ranks; an epoch's last step may have fewer. 0 is unknown
    num_evaluation_batches: int = 0  # 0 if there is no evaluation, or the number is unknown
    has_metrics: bool = False  # with a `compute_metrics` an evaluation keeps all outputs
    accumulation: Accumulation | None = None  # what it does to the gradient; None if unread
    strategy: Strategy | None = None  # what really runs; None if it ended before that was known
    device: str = ""  # what torch calls the device: `cuda:0`
    card: str = ""  # the product's name
    capability: tuple[int, int] | None = None  # the compute capability; None without CUDA
    device_bytes: int = 0
    driver: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    allocator: Mapping[str, str] = field(default_factory=dict)  # also CUDA_VISIBLE_DEVICES
    place: Place | None = None

    @property
    def family(self) -> str:
        return self.strategy.family if self.strategy is not None else "unknown"


def read_run_facts(folder: Path) -> list[RunFacts]:
    """Read what the runs of a folder wrote when they began, oldest first, without damaged files."""
    return sorted(read_all(folder, "run", RunFacts), key=lambda facts: facts.time_seconds)
