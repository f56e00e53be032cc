"""Run a command on dry cards, and read the reports of its processes."""

import json
import os
import pickle
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from trainer_plugins.allocator.model import AllocatorRules
from trainer_plugins.allocator.settings import parse
from trainer_plugins.compiled import package_site
from trainer_plugins.drycuda.command import run_fork_to_end, run_to_end
from trainer_plugins.drycuda.cuda_build import PACKAGES, DryCudaUnavailable, fetch, fetch_package
from trainer_plugins.drycuda.dry_cuda import DryCuda
from trainer_plugins.drycuda.dry_result import DryResult, SmallestCard
from trainer_plugins.drycuda.smallest import smallest_room
from trainer_plugins.drycuda.wall import Allowed, explain_refusal
from trainer_plugins.launch.main_memory import HostLimits
from trainer_plugins.planner.cards import NO_CARD, Card
from trainer_plugins.planner.plan import NotPredicted, PlanError
from trainer_plugins.planner.request import (
    GPUS_PER_NODE,
    OPTIMIZER_STEPS,
    ConfigSource,
    PlanRequest,
    TrainerSource,
)
from trainer_plugins.printable import drop_leaks, printable
from trainer_plugins.snapshot.cards import read
from trainer_plugins.snapshot.oom import SnapshotCase, case_of
from trainer_plugins.snapshot.pickled import NotReadableError, pause_collection
from trainer_plugins.snapshot.stacks import meaning_of
from trainer_plugins.units import size

_MAY_IMPORT = ("deepspeed", "peft", "trl")  # imports that a request may need and that touch no card
_LONGEST_SECONDS = 7 * 24 * 3600
_LAST_LINES = 12
_CAUSE = "Original error: "  # bitsandbytes' prefix for the reason why a library cannot be loaded

_OF_TRAINING = "in train_watched"  # a line of a traceback: a function of inside/observe.py
_NO_NUMBERS = (
    " -- losses, outputs and generated texts mean nothing on a dry card: skip a check of them where"
    " os.environ has TRAINER_PLUGINS_DRYCUDA"
)

_ERROR = re.compile(r"(?:^|\]: )(?!\S*(?:ChildFailed|CalledProcess))[\w.]*(?:Error|Exception)\b")
"""The line of an exception, also behind torchrun's rank."""


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Describes a command to run, and the cards of the machine that it is meant for."""

    card: Card  # with `NO_CARD` the plan gives the memory, but not whether it fits
    command: Sequence[str] = ()  # the program and its arguments
    request: PlanRequest | None = None  # trained instead of a command, by `inside/of_request.py`
    num_cards: int = 1
    host: HostLimits = field(default_factory=HostLimits)  # the main memory of each machine
    num_steps: int = 2  # optimizer steps after which the training ends
    alone: bool = False  # run only rank 0, and assume that every other rank behaves like it
    # the time limit, after which the command and every process it started are ended
    timeout_seconds: float = 600
    snapshot: Path | None = None  # where to keep the allocator's snapshot of the fullest card
    # fields of TrainingArguments that replace the command's own
    changed: Mapping[str, object] = field(default_factory=dict)
    # variables that the command gets besides those of this process
    environment: Mapping[str, str] = field(default_factory=dict)
    # folders that the command may really write to, and whether it may reach other hosts
    allowed: Allowed = field(default_factory=Allowed)
    # whether one run on unlimited cards is enough, and the allocator's model computes the rest
    foretells: bool = False

    @property
    def of_config(self) -> PlanRequest | None:
        """Return the request if it has a model's config; None for a Trainer or a command."""
        is_config = self.request is not None and isinstance(self.request.source, ConfigSource)
        return self.request if is_config else None


def dry_run_of(request: PlanRequest, timeout_seconds: float) -> DryRun:
    """Return the dry run that trains a request.

    Raises:
        PlanError: the time limit or the allocator settings are wrong.
    """
    if not 0 < timeout_seconds <= _LONGEST_SECONDS:  # also refuses NaN
        raise PlanError(
            f"--timeout must be above 0 and at most a week, in seconds, got {timeout_seconds:g}"
        )
    try:
        parse(request.allocator)
    except ValueError as error:
        raise PlanError(f"allocator settings: {error}") from error
    is_launched = request.launch_file is not None or bool(request.environment)
    is_divided = request.num_gpus > 1 or is_launched or request.uses_deepspeed
    parts = request.source.device_map if isinstance(request.source, TrainerSource) else {}
    num_cards = max(min(request.num_gpus, GPUS_PER_NODE), 1 + max(parts.values(), default=0))
    return DryRun(
        request=request,
        card=request.card or NO_CARD,
        host=request.host,
        num_cards=num_cards,
        num_steps=OPTIMIZER_STEPS,
        alone=is_divided,
        timeout_seconds=timeout_seconds,
        foretells=True,
    )


def run_dry(run: DryRun, tell: Callable[[str], None]) -> DryResult:
    """Run a command or a request for `dry_plan`; first download missing parts."""
    if "TRAINER_PLUGINS_DRYCUDA" in os.environ:
        raise PlanError("this process is a dry run already, in which nothing else can be planned")
    if os.environ.get("TRAINER_PLUGINS_FETCH") != "never":
        fetch(tell)
    with DryCuda(run.card, run.num_cards, alone=run.alone, allowed=run.allowed) as dry:
        try:
            result = _run_once(run, dry, tell)
        except PlanError as error:
            if run.request is None or not _fetch_missing(str(error), tell):
                raise
        else:
            return _resume_apart(run, result, dry, tell)
    return run_dry(run, tell)  # now on libraries that also export the package's names


def _fetch_missing(error: str, tell: Callable[[str], None]) -> bool:
    """Fetch the package that an error asks for; return whether that worked."""
    for name in PACKAGES:
        if name in error.replace("-", "_"):
            try:
                return fetch_package(name, tell)
            except DryCudaUnavailable as failed:
                raise PlanError(f"{error}; {failed}") from failed
    return False


def _resume_apart(
    run: DryRun, result: DryResult, dry: DryCuda, tell: Callable[[str], None]
) -> DryResult:
    """Resume from the run's checkpoint in a second process, if the run cannot do so itself."""
    if result.died or not any(each["resumes_apart"] for each in result.seen):
        return result
    num_bytes = _states_in_main_memory(dry.folder, result.seen[0]["world_size"], run)
    if num_bytes > psutil.virtual_memory().available:
        result.seen[0]["notes"].append(
            f"resuming was not run: it may take {size(num_bytes)} of main memory here"
        )
        return result
    tell("planning: running it again, from the checkpoint that it saved")
    again = {**run.environment, "TRAINER_PLUGINS_DRY_RESUMES": "1"}
    try:
        resumed = _run_once(replace(run, environment=again, snapshot=None), dry, tell)
    except (PlanError, NotReadableError) as error:
        result.seen[0]["notes"].append(f"resuming was not measured: {error}")
        return result
    return _both(result, resumed)


def _run_once(run: DryRun, dry: DryCuda, tell: Callable[[str], None]) -> DryResult:
    """Run the command once; its output stays with the card."""
    for path in dry.folder.glob("seen-*.json"):
        path.unlink()
    environment = {
        **dry.environment({**_environment(run), **run.environment}),
        "TRAINER_PLUGINS_DRY_STEPS": str(run.num_steps),
        "TRAINER_PLUGINS_DRY_CHANGED": json.dumps(run.changed),
    }
    log = dry.folder / "log"
    if run.request is not None:
        file = dry.folder / "request"
        file.write_bytes(pickle.dumps(run.request))
        imports = [name for name in _MAY_IMPORT if find_spec(name)]
        if run.request.uses_deepspeed:
            imports.append("deepspeed.compile.backend")  # as its engine imports it in each run
        seconds = run.timeout_seconds
        code = run_fork_to_end(file, imports, dry, environment, log, seconds)
    else:
        code = run_to_end(dry.command(run.command), environment, log, run.timeout_seconds)
    seen = [json.loads(path.read_text()) for path in dry.folder.glob("seen-*.json")]
    refused = dry.folder / "refused-plan"
    if not seen and refused.exists():
        is_predicted, why = json.loads(refused.read_text())
        raise PlanError(why) if is_predicted else NotPredicted(why)
    if not seen:
        raise PlanError(_never_trained(code, log, tell))
    seen.sort(key=lambda each: _peak(each, 1), reverse=True)
    seen[0]["notes"] += [f"the dry run was not allowed to {what}" for what in dry.read_refusals()]
    snapshot = dry.folder / f"snapshot-{seen[0]['rank']}.pickle"
    if run.snapshot is not None:
        shutil.copyfile(snapshot, run.snapshot)
    with pause_collection():
        case = case_of(snapshot, own_torch=seen[0]["versions"]["torch"])
        return DryResult(seen, case, _smallest(dry.folder, seen, case, run.card))


_LAUNCHED = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("ACCELERATE_", "FSDP_", "TORCHELASTIC_"),
)
"""Prefixes of a launched rank's variables; a request brings its own launch."""


def _environment(run: DryRun) -> dict[str, str]:
    """Return this process's environment; for a request, without a launched rank's variables."""
    if run.request is None:
        return dict(os.environ)
    kept = {
        name: value
        for name, value in os.environ.items()
        # transformers 4 takes mixed precision from the environment, regardless of the arguments
        if name == "ACCELERATE_MIXED_PRECISION" or not name.startswith(_LAUNCHED)
    }
    folders = [os.path.abspath(folder) for folder in sys.path]
    source = run.request.source
    if isinstance(source, ConfigSource) and isinstance(source.arguments, tuple):
        # Without the current folder, in which a `timeit.py` would shadow Python's.
        home = str(Path(__file__).parent.parent.parent)
        folders = [folder for folder in folders if folder == home or folder != os.getcwd()]
    path = os.pathsep.join((*folders, str(package_site())))
    # each version of torch reads this name of the variable, and first
    settings = {"PYTORCH_CUDA_ALLOC_CONF": run.request.allocator}
    return kept | settings | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}


def _states_in_main_memory(folder: Path, world_size: int, run: DryRun) -> int:
    """Return the most that resuming copies: accelerate's FSDP shares out one file of all states."""
    whole = sum(path.stat().st_size for path in folder.rglob("optimizer.bin"))
    shares = sum(path.stat().st_size for path in folder.rglob("*optim_states.pt"))
    return shares + (whole // world_size if run.alone else whole)


def _both(first: DryResult, resumed: DryResult) -> DryResult:
    """Merge a run and its resumption: take the fuller one, or the one that died."""
    is_fuller = _peak(resumed.seen[0]) > _peak(first.seen[0])
    both, less = (resumed, first) if resumed.died or is_fuller else (first, resumed)
    own = both.seen[0]
    its = next((each for each in less.seen if each["rank"] == own["rank"]), less.seen[0])
    one, other = (own, its) if both is first else (its, own)
    own |= {
        "moments": {**other["moments"], **one["moments"]},
        "notes": list(dict.fromkeys([*one["notes"], *other["notes"]])),
        "host": {**other["host"], **one["host"]},
        "process_bytes": max(one["process_bytes"], other["process_bytes"]),
        "tokens": one["tokens"],
    }
    both.timeline = [*first.timeline, *resumed.timeline]
    smallest = [each.smallest for each in (first, resumed) if each.smallest is not None]
    both.smallest = max(smallest, key=lambda each: each.card_bytes) if smallest[1:] else None
    return both


def _peak(seen: Mapping[str, Any], kind: int = 0) -> int:
    """Return the allocated peak of a process, or the reserved one (1)."""
    moments: Mapping[str, list[tuple[int, int]]] = seen["moments"]
    return max(peak[kind] for peaks in moments.values() for peak in peaks)


def _never_trained(code: int, log: Path, tell: Callable[[str], None]) -> str:
    """Explain a missing result: by the error of the program, not that of its launcher."""
    lines = drop_leaks(log.read_text(errors="replace")).strip().splitlines()
    errors = [at for at, line in enumerate(lines) if _ERROR.search(line)]
    end = errors[-1] + 1 if errors else len(lines)
    for line in lines[max(0, end - _LAST_LINES) : end]:
        tell(f"    {printable(line)}")
    last = f": {lines[end - 1].strip()}" if lines else ", and wrote nothing"
    causes = [line.partition(_CAUSE)[2] for line in lines if _CAUSE in line]
    last += f" ({causes[-1]})" if causes else ""
    if code == 0:
        last = (
            ": plans cover training by transformers' Trainer; other programs run on dry cards"
            " with `python -m trainer_plugins.drycuda`"
        )
    refused = explain_refusal("\n".join(lines))
    if code > 0 and any(_OF_TRAINING in line for line in lines):
        return f"the command exited with code {code} in its training{last}{refused or _NO_NUMBERS}"
    return f"the command exited with code {code} before a Trainer had trained{last}{refused}"


def _smallest(
    folder: Path, seen: Sequence[Mapping[str, Any]], case: SnapshotCase, card: Card
) -> SmallestCard | None:
    """Return the smallest card on which all processes complete; None if the model cannot tell."""
    repeated = case.repeated
    rules = repeated.rules if repeated is not None else AllocatorRules()
    is_repeated = repeated is not None and repeated.outcome.is_same and case.oom is None
    found = SmallestCard(0, None)
    for process in seen:
        path = folder / f"snapshot-{process['rank']}.pickle"
        snapshot = case.snapshot if path.name == case.snapshot.name else read(path, is_own=True)
        for each in snapshot.cards:
            outside_bytes = process["outside_bytes"][each.index]
            peak = case.in_use_bytes if is_repeated and each is case.card else None
            least = smallest_room(each, rules, card.capacity_bytes - outside_bytes, peak)
            if least is None:
                return None
            needed_bytes, fails_at = least
            place = None
            if fails_at is not None:
                place = meaning_of(snapshot.stacks[each.events[fails_at].stack]).place
            each_one = SmallestCard(needed_bytes + outside_bytes, place)
            found = max(found, each_one, key=lambda one: one.card_bytes)
    return found
