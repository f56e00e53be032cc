"""Makes a MemoryPlan of a command: runs it on dry cards, and reads what it needed.

If the cards are too small for the command, it runs again on larger ones, to say by how much.
"""

import contextlib
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from trainer_plugins.explain.snapshot.held import Category as HeldAs
from trainer_plugins.explain.snapshot.oom import SnapshotCase, case_of
from trainer_plugins.planner.cards import Card, about_context
from trainer_plugins.planner.plan import (
    MOMENTS,
    Category,
    MemoryPlan,
    Moment,
    MomentPeak,
    PlanError,
    TensorsAtPeak,
)
from trainer_plugins.printable import printable
from trainer_plugins.testing.drycuda.cuda_build import DryCudaUnavailable
from trainer_plugins.testing.drycuda.dry_cuda import DryCuda
from trainer_plugins.units import GIB

_UNLIMITED_BYTES = 4096 * GIB
_LAST_LINES = 12
_MOST_GROUPS = 10

_CATEGORIES: Mapping[HeldAs, Category] = {
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer states": "optimizer states",
    "activations": "activations",
    "logits": "logits and loss",
    "temporaries": "activations",
    "other": "activations",
    "unknown": "workspaces",
    "waiting": "activations",
}

_DECIDES = re.compile(r"libcuda|libnccl|size|buffer|alloc", re.IGNORECASE)
"""What may decide about memory; another function of a library that computes does not."""

_ERROR = re.compile(r"(?:^|\]: )(?!\S*(?:ChildFailed|CalledProcess))[\w.]*(?:Error|Exception)\b")
"""The line of an exception, also with the rank that torchrun puts before it."""

_MEANS_NOTHING = (
    "dry run: kernels were counted and not run; losses and metrics mean nothing, tokens are"
    " generated to the longest, experts get equal shares"
)


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Describes a command to run, and the cards of the machine that it is meant for."""

    command: Sequence[str]
    card: Card
    num_cards: int = 1
    num_steps: int = 2
    """Optimizer steps after which the training ends."""

    alone: bool = False
    """Whether only rank 0 runs, and the others are taken to be like it."""

    timeout_seconds: float = 600
    """After which the command and all that it started are ended."""

    snapshot: Path | None = None
    """Where to keep the allocator's snapshot of the fullest card."""


def dry_plan(run: DryRun, tell: Callable[[str], None]) -> MemoryPlan:
    """Run a command on dry cards and return what it needs of the fullest one.

    Args:
        run: the command and its cards; it may start several processes.
        tell: takes a line about what is being done.

    Raises:
        PlanError: the dry card cannot be had here, or the command ended before it trained.
    """
    tell(f"planning: running the command on a dry {run.card.name}")
    result = _seen_of(run, tell)
    if not any(each["died"] for each in result.seen):
        return _plan(result, run)
    failed = _failed_request(result)
    tell("planning: it does not fit, running it again on a card without a limit")
    unlimited = replace(run.card, capacity_bytes=_UNLIMITED_BYTES)
    result = _seen_of(replace(run, card=unlimited, snapshot=None), tell)
    return replace(_plan(result, run), fits=False, **failed)


class _Result:
    """Holds what the processes of a command have seen, the fullest one first."""

    def __init__(self, seen: list[dict[str, Any]], case: SnapshotCase) -> None:
        self.seen, self.case = seen, case


def _seen_of(run: DryRun, tell: Callable[[str], None]) -> _Result:
    try:
        made = DryCuda(run.card, run.num_cards, alone=run.alone)
    except DryCudaUnavailable as error:
        raise PlanError(str(error)) from error
    with made as dry:
        environment = {**dry.environment(), "TRAINER_PLUGINS_DRY_STEPS": str(run.num_steps)}
        log = dry.folder / "log"
        try:
            code = _ended(run, environment, log)
        finally:
            _end_what_is_left(dry.folder)
        seen = [json.loads(path.read_text()) for path in dry.folder.glob("seen-*.json")]
        if not seen:
            raise PlanError(_never_trained(code, log, tell))
        seen.sort(key=_reserved_peak, reverse=True)
        snapshot = dry.folder / f"snapshot-{seen[0]['rank']}.pickle"
        if run.snapshot is not None:
            shutil.copyfile(snapshot, run.snapshot)
        return _Result(seen, case_of(snapshot))


def _ended(run: DryRun, environment: Mapping[str, str], log: Path) -> int:
    """Run the command to its end or to the time limit; return its exit code."""
    with log.open("w") as output:
        try:
            process = subprocess.Popen(
                run.command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        except OSError as error:
            raise PlanError(f"the command cannot be run: {error}") from error
        try:
            return process.wait(run.timeout_seconds)
        except subprocess.TimeoutExpired as error:
            raise PlanError(
                f"the command took more than {run.timeout_seconds:.0f} s: raise --timeout"
            ) from error
        finally:
            process.kill()
            process.wait()


def _end_what_is_left(folder: Path) -> None:
    """End the processes that have these cards: what a launcher started may outlive it."""
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if each.environ().get("TRAINER_PLUGINS_DRYCUDA") == str(folder):
                each.kill()


def _reserved_peak(seen: Mapping[str, Any]) -> int:
    moments: Mapping[str, list[tuple[int, int]]] = seen["moments"]
    return max(reserved for peaks in moments.values() for _, reserved in peaks)


def _never_trained(code: int, log: Path, tell: Callable[[str], None]) -> str:
    """Say why there is no answer: the error of the program, not that of its launcher."""
    lines = log.read_text(errors="replace").strip().splitlines()
    errors = [at for at, line in enumerate(lines) if _ERROR.search(line)]
    end = errors[-1] + 1 if errors else len(lines)
    for line in lines[max(0, end - _LAST_LINES) : end]:
        tell(f"    {printable(line)}")
    last = f": {lines[end - 1].strip()}" if lines else ", and wrote nothing"
    return f"the command ended with exit code {code} before a Trainer had trained{last}"


def _failed_request(result: _Result) -> dict[str, Any]:
    oom = result.case.oom
    return {
        "failed_request_bytes": oom.num_bytes if oom is not None else 0,
        "failed_request": result.case.request.place if oom is not None else None,
    }


def _plan(result: _Result, run: DryRun) -> MemoryPlan:
    fullest, card = result.seen[0], run.card
    world_size = fullest["world_size"]
    alone = f"rank 0 of {world_size} ran alone, the other ranks are taken to be like it"
    moments: dict[Moment, MomentPeak] = {
        moment: MomentPeak(
            allocated_bytes=max(allocated for allocated, _ in fullest["moments"][moment]),
            reserved_bytes=max(reserved for _, reserved in fullest["moments"][moment]),
        )
        for moment in MOMENTS
        if moment in fullest["moments"]
    }
    at = max(moments, key=lambda moment: moments[moment].allocated_bytes)
    reserved = max(peak.reserved_bytes for peak in moments.values())
    return MemoryPlan(
        allocated_peak_bytes=moments[at].allocated_bytes,
        reserved_peak_bytes=reserved,
        nvidia_smi_peak_bytes=reserved + card.context_bytes,
        host_ram_bytes_per_node=0,
        host_process_bytes_per_node=sum(each["host_bytes"] for each in result.seen)
        * (fullest["ranks_of_node"] if run.alone else 1),
        capacity_bytes=card.capacity_bytes,
        fits=reserved + card.context_bytes <= card.capacity_bytes,
        moment=at,
        breakdown=_breakdown(result.case, moments[at].allocated_bytes),
        top_tensors=(),
        groups_at_peak=tuple(_groups(result.case, at)),
        moments=moments,
        num_flushes=fullest["num_retries"],
        not_reliable=tuple(_unreliable(fullest)),
        assumptions=(_MEANS_NOTHING, *[alone] * run.alone, *fullest["notes"], about_context(card)),
        gpu=card.name,
        num_gpus=max(run.num_cards, world_size),
        context_bytes=card.context_bytes,
        num_parameters=fullest["num_parameters"],
        num_trainable_parameters=fullest["num_trainable_parameters"],
        versions=fullest["versions"],
        cards=_cards(fullest),
        timeline=tuple((moment, now, held) for moment, now, held in fullest["timeline"]),
        planned={
            "model": f"{fullest['model']}, trained by {fullest['trainer']}",
            "rows": f"{fullest['rows']} at once, on {world_size} ranks",
            "command": shlex.join(run.command),
        },
    )


def _cards(seen: Mapping[str, Any]) -> tuple[MomentPeak, ...]:
    """Return the peaks of each card of a process that uses several."""
    by_card = zip(*seen["moments"].values(), strict=True)
    cards = [
        MomentPeak(
            allocated_bytes=max(allocated for allocated, _ in peaks),
            reserved_bytes=max(reserved for _, reserved in peaks),
        )
        for peaks in by_card
    ]
    return tuple(cards) if sum(card.reserved_bytes > 0 for card in cards) > 1 else ()


def _breakdown(case: SnapshotCase, allocated_bytes: int) -> dict[Category, int]:
    """Return the categories at the peak; what the recording does not know is a workspace."""
    found: dict[Category, int] = {}
    for name, num_bytes in case.held.categories.items():
        category = _CATEGORIES[name]
        found[category] = found.get(category, 0) + num_bytes
    rest = allocated_bytes - sum(found.values())
    # A block that is released while it is counted is in the recording, and not in the peak.
    where: Category = "workspaces" if rest >= 0 else "activations"
    found[where] = found.get(where, 0) + rest
    return {name: num_bytes for name, num_bytes in found.items() if num_bytes > 0}


def _groups(case: SnapshotCase, moment: Moment) -> Iterator[TensorsAtPeak]:
    """Yield what takes most at the peak: equal blocks of one line as one."""
    counts: dict[tuple[int, HeldAs, str], int] = {}
    for life in case.sorter.alive_at(case.held.position):
        key = (life.num_bytes, case.sorter.category(life), case.sorter.place(life))
        counts[key] = counts.get(key, 0) + 1
    largest = sorted(counts.items(), key=lambda item: -item[0][0] * item[1])[:_MOST_GROUPS]
    for (num_bytes, held_as, place), count in largest:
        yield TensorsAtPeak(
            count=count,
            num_bytes=num_bytes,
            category=_CATEGORIES[held_as],
            part="",
            operation=place,
            moment=moment,
            dtype="",
        )


def _unreliable(seen: Mapping[str, Any]) -> Iterator[str]:
    unwritten = {
        name.split(" ", 1)[1]: number
        for name, number in seen["counters"].items()
        if name.startswith("unwritten ") and _DECIDES.search(name)
    }
    if unwritten:
        calls = ", ".join(f"{name} ({number:,})" for name, number in sorted(unwritten.items())[:5])
        yield f"functions without code of their own were called: {calls}"
    for name, number in seen["unknown_shapes"].items():
        yield f"{number:,} results of {name} have a shape that no value decided: they are empty"
    if seen["num_ooms"] and not seen["died"]:
        yield f"it ran out of memory {seen['num_ooms']} times and went on"
    if seen["num_retries"]:
        yield f"the allocator released its cache {seen['num_retries']} times to go on"
