"""Seen: the results of one process of a dry run, and the files that hold them."""

import functools
import json
import os
import pickle
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from trainer_plugins.inside import shapes
from trainer_plugins.inside.process import counters, outside_bytes
from trainer_plugins.snapshot.pickled import pause_collection

_OURS = re.compile(r"trainer_plugins/(?:(?:drycuda|inside|plug_in)/|patched\.py$)|torch/_ops\.py$")
_BACKWARD = {"filename": "/torch/autograd/graph.py", "line": 0, "name": "_engine_run_backward"}

MOST_EVENTS = 1_000_000
"""Number of the allocator's latest events to record."""


@dataclass(slots=True)
class Seen:
    """The results of one process. Sizes in bytes; lists are by card."""

    pid: int = field(default_factory=os.getpid)
    # the allocated and the reserved peak of each moment
    moments: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    arguments: dict[str, object] = field(default_factory=dict)
    num_parameters: int = 0
    num_trainable_parameters: int = 0
    world_size: int = 1
    rank: int = 0
    ranks_of_node: int = 1
    rows: int = 0
    tokens: int = 0  # length of the longest row; 0 if rows have none
    notes: list[str] = field(default_factory=list)
    is_fsdp: bool = False
    # another process has to resume: under FSDP and DeepSpeed a model is wrapped only once
    resumes_apart: bool = False
    num_ooms: int = 0
    died: bool = False  # the program ended because it ran out of memory
    num_retries: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    unknown_shapes: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    # the peak of tensors in main memory at each moment
    host: dict[str, int] = field(default_factory=dict)
    # moments in which only the first rank reads or gathers something in main memory
    of_first_rank: list[str] = field(default_factory=list)
    cast_bytes: int = 0  # of weights that all ranks create while loading
    process_bytes: int = 0  # of Python, its libraries and data, in main memory when training began
    # memory used outside the allocator on each card of this process: the contexts, including that
    # of a launcher that has touched the card
    outside_bytes: list[int] = field(default_factory=list)
    # why survival would never divide batches in training or evaluation; empty if it would
    why_whole: dict[str, list[str]] = field(default_factory=dict)
    missed: str = ""  # where the program would have trained again, had it come so far
    is_quantised: bool = False
    model: str = ""
    trainer: str = ""
    # when each moment began, in microseconds since 1970, the first one at 0
    began: list[tuple[int, str]] = field(default_factory=lambda: [(0, "load")])
    # a description of the run, if it comes from a request and not from a command
    planned: dict[str, str] = field(default_factory=dict)
    # how the frozen base was streamed, if it was, by the names of `Streamed`'s fields
    streamed: dict[str, object] | None = None
    # the effect of gradient accumulation on the gradient
    accumulation: dict[str, object] = field(default_factory=dict)
    # the tensors at each address, at several times: see `Namer.names_of`
    names: list[tuple[int, dict[int, tuple[str, str]]]] = field(default_factory=list)


def find_peak(moments: Mapping[str, list[tuple[int, int]]]) -> int:
    """Return the most bytes that were allocated on one card."""
    return max((allocated for peaks in moments.values() for allocated, _ in peaks), default=0)


def _is_less(seen: Seen, folder: Path) -> bool:
    """Return whether another process, whose training came before, has taken more memory."""
    path = folder / f"seen-{seen.rank}.json"
    if seen.died or not path.exists():
        return False
    other = json.loads(path.read_text())
    is_another = other["pid"] != seen.pid and not other["died"]
    return is_another and find_peak(other["moments"]) >= find_peak(seen.moments)


def write(seen: Seen) -> None:
    """Write the results of a process, and a snapshot of the allocator.

    If a program trains in several processes, one after the other, those of the fullest stay.
    """
    stats = [torch.cuda.memory_stats(index) for index in range(torch.cuda.device_count())]
    seen.num_ooms = sum(each.get("num_ooms", 0) for each in stats)
    seen.num_retries = sum(each.get("num_alloc_retries", 0) for each in stats)
    seen.counters, seen.unknown_shapes = counters(), dict(shapes.unknown)
    seen.outside_bytes = [outside_bytes(index) for index in range(torch.cuda.device_count())]
    for name in ("torch", "transformers", "accelerate", "peft", "trl", "deepspeed"):
        if name in sys.modules:
            seen.versions[name] = sys.modules[name].__version__
    folder = Path(os.environ["TRAINER_PLUGINS_DRYCUDA"])
    if _is_less(seen, folder):
        return
    draft = folder / f"snapshot-{seen.rank}.draft"  # the program may be ended while it writes
    with pause_collection(), draft.open("wb") as file:
        snapshot = torch.cuda.memory._snapshot()
        if max(map(len, snapshot["device_traces"])) >= MOST_EVENTS:
            seen.notes.append(
                f"of the allocator's events the last {MOST_EVENTS:,} are known: no smallest card"
            )
        _leave_out_the_dry_run(snapshot)
        pickle.dump(snapshot, file)
    draft.rename(draft.with_suffix(".pickle"))
    write_results(seen)


def write_results(seen: Seen) -> None:
    """Write the results of a process alone."""
    folder = Path(os.environ["TRAINER_PLUGINS_DRYCUDA"])
    if _is_less(seen, folder):
        return
    draft = folder / f"seen-{seen.rank}.draft"
    results = {each.name: getattr(seen, each.name) for each in fields(seen)}
    draft.write_text(json.dumps(results, default=str))
    draft.rename(folder / f"seen-{seen.rank}.json")


def _leave_out_the_dry_run(snapshot: dict[str, Any]) -> None:
    """Remove the dry run's own frames from the stacks.

    A stack without others belongs to autograd's thread, which has no Python below it.
    """
    segments = (block for segment in snapshot["segments"] for block in segment["blocks"])
    left: dict[tuple[int, ...], list[Mapping[str, Any]]] = {}  # by the identities of frames
    for each in (*segments, *(event for card in snapshot["device_traces"] for event in card)):
        if frames := each.get("frames"):
            key = tuple(map(id, frames))
            if key not in left:
                own = [frame for frame in frames if not _is_ours(frame["filename"])]
                left[key] = own or [_BACKWARD]
            each["frames"] = left[key]  # a shared list, which a pickle stores once


@functools.cache
def _is_ours(filename: str) -> bool:
    return _OURS.search(filename) is not None
