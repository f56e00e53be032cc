"""RunFacts: a run's setup, as `run.json` holds it; `launch/gather_run_facts.py` fills it in."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainer_plugins.accumulation import Accumulation
from trainer_plugins.record.folder import read_all
from trainer_plugins.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The location of a process, and its limits there."""

    pid: int
    host: str = ""  # the machine's name; empty in files of earlier versions
    job: str = ""  # the scheduler's job, such as `Slurm 4242`; empty without one
    kernel: str  # machine, boot and control group; counts are comparable only if it is equal
    num_oom_kills: int = 0  # processes of this container killed for lack of memory so far
    main_memory_bytes: int = 0  # the machine's, or the container's limit if that is lower
    shm_bytes: int = 0  # size of /dev/shm
    limits: Mapping[str, str] = field(default_factory=dict)  # other limits: Slurm's grants, WSL


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The launcher, its file and its command, without secrets."""

    file: str = ""  # launch file of `accelerate launch`; empty if there is none
    words: tuple[str, ...] = ()  # the launcher's command line; empty without a launcher
    environment: Mapping[str, str] = field(default_factory=dict)  # set by accelerate for its ranks
    deepspeed: Mapping[str, object] = field(default_factory=dict)  # its file, with every "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The facts about a run that an explanation needs, without secrets."""

    version: int = 1
    process: str  # the process's name in the lines of the timeline
    time_seconds: float  # when training began, in seconds since the Unix epoch
    step: int  # optimizer steps completed before: 0, unless it resumed
    rank: int
    world_size: int
    command: tuple[str, ...]  # the words after `python`, with secrets masked
    launch: Launch | None = None  # how it was launched
    trainer: str = ""  # class of the Trainer
    model: str = ""  # class of the model
    built_class: str = ""  # class, with module, that the config builds, or an adapter's base
    model_config: Mapping[str, object] = field(default_factory=dict)
    adapter: Mapping[str, object] = field(default_factory=dict)  # PeftConfig's fields; or empty
    dtype: str = ""  # dtype of the weights when training began: `bfloat16`
    arguments: Mapping[str, object] = field(default_factory=dict)  # without tokens and keys
    override: str = ""  # prefix of overrides in a Hydra app: `++trainer.args.`; empty without Hydra
    num_rows_a_step: int = 0  # of all ranks; an epoch's last step may have fewer. 0: unknown
    num_evaluation_batches: int = 0  # 0 without an evaluation, or if unknown
    has_metrics: bool = False  # with a `compute_metrics` an evaluation keeps all outputs
    accumulation: Accumulation | None = None  # its effect on the gradient; None if unread
    strategy: Strategy | None = None  # in force; None if the run ended before it was known
    device: str = ""  # torch's name for the device: `cuda:0`
    card: str = ""  # product name
    capability: tuple[int, int] | None = None  # compute capability; None without CUDA
    device_bytes: int = 0
    driver: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    allocator: Mapping[str, str] = field(default_factory=dict)  # also CUDA_VISIBLE_DEVICES
    place: Place | None = None

    @property
    def family(self) -> str:
        return self.strategy.family if self.strategy is not None else "unknown"


def read_run_facts(folder: Path) -> list[RunFacts]:
    """Read the facts that a folder's runs wrote at the start, oldest first; skip damaged files."""
    return sorted(read_all(folder, "run", RunFacts), key=lambda facts: facts.time_seconds)
