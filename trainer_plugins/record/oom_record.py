"""OomRecord: the facts of a rank's OOM, in `oom-rank0.json`, `oom-rank0-2.json`, and so on."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trainer_plugins.oom import OutOfMemory
from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.folder import from_json, place_of_run, read_all, read_json
from trainer_plugins.record.run_facts import RunFacts
from trainer_plugins.record.shown import Frame, Process

_OWN = {"error", "error_class", "rank"}  # no other JSON has all of these names

# The run's activity; `begin` is before the first step, `other` is code without a Trainer.
Moment = Literal["train", "eval", "predict", "generate", "save", "resume", "begin", "other"]
Part = Literal["forward", "backward", "optimizer", ""]  # part of a step; empty outside steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A tensor of the batch."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A tensor that neither a model nor its optimizer owns, and its holder."""

    num_bytes: int
    shape: tuple[int, ...]
    holder: str  # path as in code: `MyCallback.outputs[0] -> DynamicCache.layers[0]`


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModel:
    """The device memory of one model's parameters."""

    name: str
    num_bytes: int
    holder: str = ""  # path as in code: `a local of train() -> Distilling.teacher`

    @property
    def place(self) -> str:
        """Return the last link of the path: `Distilling.teacher`."""
        return self.holder.rpartition(" -> ")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """The memory of live tensors on the device at the time of the error; sizes in bytes."""

    category_bytes: Mapping[str, int]  # parameter, buffer, gradient, optimizer, activation, other
    hidden_bytes: int  # in no tensor visible to Python: saved by autograd for the backward pass
    module_bytes: Mapping[str, int]  # parameters, gradients and states, largest first
    models: tuple[LiveModel, ...]  # models that are not part of another one, largest first
    largest: tuple[Held, ...]
    graphs: tuple[Held, ...] = ()  # ends of autograd graphs that no running function holds

    @property
    def all_bytes(self) -> dict[str, int]:
        """Return the categories, including the memory that autograd hides."""
        return {**self.category_bytes, "saved by autograd": self.hidden_bytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The last entry of another rank's timeline."""

    rank: int
    step: int
    time_seconds: float
    moment: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The state of main memory; sizes in bytes."""

    resident_bytes: int
    total_bytes: int
    free_bytes: int
    num_oom_kills: int
    shm_total_bytes: int
    shm_free_bytes: int
    worker_bytes: tuple[int, ...] = ()  # unshared memory of each remaining dataloader worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan's prediction for one card; sizes in bytes."""

    source: str  # origin: `plan_run`, or a file in the output_dir
    nvidia_smi_peak_bytes: int
    moment: str  # moment of the peak
    capacity_bytes: int | None = None
    fits: bool | None = None  # the plan's verdict; None if no card was named


@dataclass(frozen=True, slots=True, kw_only=True)
class OomRecord:
    """The facts for an explanation. Unreadable facts are missing, not guessed."""

    version: int = 1
    time_seconds: float
    rank: int
    call: str  # the call that raised: `train`, `evaluate`, `predict`, `report_oom`
    step: int
    moment: Moment
    part: Part
    error_class: str
    error: OutOfMemory
    frames: tuple[Frame, ...]  # outermost first
    batch: Mapping[str, Shape] = field(default_factory=dict)
    reading: MemoryReading | None = None  # after the error: the operation's temporaries are gone
    readings: tuple[MemoryReading, ...] = ()  # last readings before the error, oldest first
    alive: Alive | None = None
    processes: tuple[Process, ...] | None = None
    peers: tuple[Peer, ...] = ()
    host: Host | None = None
    snapshot: str = ""  # file of torch's own snapshot, if there is one
    plan: Planned | None = None
    run: RunFacts

    @property
    def where(self) -> str:
        part = f", {self.part}" if self.part else ""
        return f"step {self.step} ({self.moment}{part})"

    @property
    def words(self) -> str:
        return f"rank {self.rank} ran out of memory in {self.where}"


def refuse_damaged_records(folder: Path) -> None:
    """Raise ValueError, with the reason, for the first damaged record of a folder."""
    for path in sorted(place_of_run(folder).glob("oom-rank*.json")):
        open_oom_record(path)


def read_oom_records(folder: Path) -> list[OomRecord]:
    """Read the records of all ranks in a folder, oldest first, skipping damaged files."""
    records = read_all(folder, "oom-rank[0-9]+", OomRecord)
    return sorted(records, key=lambda record: record.time_seconds)


def open_oom_record(path: Path) -> OomRecord | None:
    """Read a record by its path; None if the file is not one, ValueError if a value is wrong."""
    try:
        value = read_json(path)
    except ValueError:
        return None
    is_named = re.fullmatch(r"oom-rank\d+(?:-\d+)?\.json", path.name) is not None
    if not is_named and not (isinstance(value, Mapping) and value.keys() >= _OWN):
        return None
    try:
        return from_json(OomRecord, value)
    except (TypeError, ValueError) as error:
        why = str(error).replace("OomRecord.__init__() ", "")
        raise ValueError(f"{path} is not a readable OOM record: {why}") from error
