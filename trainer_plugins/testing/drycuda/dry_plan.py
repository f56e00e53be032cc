"""Makes a MemoryPlan of a command: runs it on dry cards, and reads what it needed.

If the cards are too small for the command, it runs again on larger ones, to say by how much.
"""

import json
import os
import re
import shlex
import shutil
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from trainer_plugins.allocator.model import AllocatorRules
from trainer_plugins.explain.snapshot.cards import read
from trainer_plugins.explain.snapshot.held import Category as HeldAs
from trainer_plugins.explain.snapshot.lives import Life
from trainer_plugins.explain.snapshot.oom import SnapshotCase, case_of
from trainer_plugins.explain.snapshot.stacks import meaning_of
from trainer_plugins.planner.cards import Card, about_context
from trainer_plugins.planner.plan import (
    MOMENTS,
    Category,
    MemoryPlan,
    Moment,
    MomentPeak,
    PlanError,
    TensorsAtPeak,
    part_of,
)
from trainer_plugins.printable import printable
from trainer_plugins.testing.drycuda.command import ended
from trainer_plugins.testing.drycuda.cuda_build import DryCudaUnavailable
from trainer_plugins.testing.drycuda.dry_cuda import DryCuda
from trainer_plugins.testing.drycuda.smallest import smallest_room
from trainer_plugins.units import GIB, size

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

_DECIDES = re.compile(r"libcuda|libnccl|size|buffer|alloc|MakePlan", re.IGNORECASE)
"""What may decide about memory; another function of a library that computes does not."""

_ERROR = re.compile(r"(?:^|\]: )(?!\S*(?:ChildFailed|CalledProcess))[\w.]*(?:Error|Exception)\b")
"""The line of an exception, also with the rank that torchrun puts before it."""

_MEANS_NOTHING = (
    "dry run: kernels were counted and not run; losses and metrics mean nothing, tokens are"
    " generated to the longest, experts get equal shares"
)

_ONE_RUN = (
    "one process uses several cards: runs of it free blocks in different orders, and the smallest"
    " card is that of this run"
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

    changed: Mapping[str, object] = field(default_factory=dict)
    """Fields of TrainingArguments that are not as the command says."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the command gets besides those of this process."""

    foretells: bool = False
    """Whether one run on cards without a limit is enough: the allocator's model says the rest."""


class DryAnswer(NamedTuple):
    """Holds what a dry run has shown."""

    plan: MemoryPlan
    arguments: Mapping[str, Any]
    """The TrainingArguments of the run."""

    tokens: int
    """Of the longest row; 0 if rows have none."""


def dry_plan(run: DryRun, tell: Callable[[str], None]) -> DryAnswer:
    """Run a command on dry cards and return what it needs of the fullest one.

    Args:
        run: the command and its cards; it may start several processes.
        tell: takes a line about what is being done.

    Raises:
        PlanError: the dry card cannot be had here, or the command ended before it trained.
    """
    unlimited = replace(run.card, capacity_bytes=_UNLIMITED_BYTES)
    tell(f"planning: running the command on a dry {run.card.name}")
    if run.foretells:
        result = _seen_of(replace(run, card=unlimited), tell)
        least = result.smallest.get("smallest_card_bytes")
        if least is not None:
            plan = replace(_plan(result, run), fits=least <= run.card.capacity_bytes)
            return result.answer(plan)
    result = _seen_of(run, tell)
    if not any(each["died"] for each in result.seen):
        return result.answer(_plan(result, run))
    failed = _failed_request(result)
    tell("planning: it does not fit, running it again on a card without a limit")
    result = _seen_of(replace(run, card=unlimited, snapshot=None), tell)
    return result.answer(replace(_plan(result, run), fits=False, **failed))


class _Result:
    """Holds what the processes of a command have seen, the fullest one first."""

    def __init__(
        self, seen: list[dict[str, Any]], case: SnapshotCase, smallest: Mapping[str, Any]
    ) -> None:
        self.seen, self.case, self.smallest = seen, case, smallest

    def answer(self, plan: MemoryPlan) -> DryAnswer:
        """Return a plan that was made of this, with what else was seen."""
        return DryAnswer(plan, self.seen[0]["arguments"], self.seen[0]["tokens"])

    def at_peak(self) -> list[Life]:
        """Return the blocks that were in use at the peak."""
        return self.case.sorter.alive_at(self.case.held.position)

    def name_of(self, life: Life) -> tuple[Category, str]:
        """Return what a block was for, and the parameter that it belonged to, if one."""
        named: tuple[Category, str] | None = self.seen[0]["named"].get(str(life.birth))
        return named or (_CATEGORIES[self.case.sorter.category(life)], "")

    def moment_of(self, life: Life) -> Moment:
        """Return the moment in which a block was allocated."""
        began: list[tuple[int, Moment]] = self.seen[0]["beginnings"]
        at = bisect_right(began, life.birth, key=lambda each: each[0]) - 1
        return began[max(at, 0)][1]


def _seen_of(run: DryRun, tell: Callable[[str], None]) -> _Result:
    try:
        made = DryCuda(run.card, run.num_cards, alone=run.alone)
    except DryCudaUnavailable as error:
        raise PlanError(str(error)) from error
    with made as dry:
        environment = {
            **dry.environment({**os.environ, **run.environment}),
            "TRAINER_PLUGINS_DRY_STEPS": str(run.num_steps),
            "TRAINER_PLUGINS_DRY_CHANGED": json.dumps(run.changed),
        }
        log = dry.folder / "log"
        code = ended(run.command, environment, log, run.timeout_seconds)
        seen = [json.loads(path.read_text()) for path in dry.folder.glob("seen-*.json")]
        if not seen:
            raise PlanError(_never_trained(code, log, tell))
        seen.sort(key=_reserved_peak, reverse=True)
        snapshot = dry.folder / f"snapshot-{seen[0]['rank']}.pickle"
        if run.snapshot is not None:
            shutil.copyfile(snapshot, run.snapshot)
        case = case_of(snapshot)
        return _Result(seen, case, _smallest(dry.folder, seen, case, run.card))


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
    if code == 0:
        last = (
            ": a plan is of a training by transformers' Trainer; other programs run on dry cards"
            " by `python -m trainer_plugins.testing.drycuda`"
        )
    return f"the command ended with exit code {code} before a Trainer had trained{last}"


def _failed_request(result: _Result) -> dict[str, Any]:
    oom = result.case.oom
    return {
        "failed_request_bytes": oom.num_bytes if oom is not None else 0,
        "failed_request": result.case.request.place if oom is not None else None,
    }


def _smallest(
    folder: Path, seen: Sequence[Mapping[str, Any]], case: SnapshotCase, card: Card
) -> Mapping[str, Any]:
    """Return the smallest card on which all processes complete, and what fails on less."""
    rules = case.repeated.rules if case.repeated is not None else AllocatorRules()
    needed: tuple[int, str | None] = (0, None)
    for process in seen:
        path = folder / f"snapshot-{process['rank']}.pickle"
        snapshot = case.snapshot if path.name == case.snapshot.name else read(path)
        for each in snapshot.cards:
            outside_bytes = process["outside_bytes"][each.index]
            least = smallest_room(each, rules, card.capacity_bytes - outside_bytes)
            if least is None:
                return {}
            place = None
            if least.fails_at is not None:
                place = meaning_of(snapshot.stacks[each.stacks[least.fails_at]]).place
            found = (least.room_bytes + outside_bytes, place)
            needed = max(needed, found, key=lambda pair: pair[0])
    card_bytes, place = needed
    return {"smallest_card_bytes": card_bytes, "fails_on_less": place}


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
    times = fullest["ranks_of_node"] if run.alone else 1
    pinned = times * sum(each["counters"]["bytes pinned at most"] for each in result.seen)
    tokens = f" of {fullest['tokens']:,} tokens" if fullest["tokens"] else ""
    at = max(moments, key=lambda moment: moments[moment].allocated_bytes)
    reserved = max(peak.reserved_bytes for peak in moments.values())
    outside = max(fullest["outside_bytes"])
    others = (
        f"other processes hold {size(outside - card.context_bytes)} of the card: a launcher that"
        " has touched it has a context there"
    )
    return MemoryPlan(
        allocated_peak_bytes=moments[at].allocated_bytes,
        reserved_peak_bytes=reserved,
        nvidia_smi_peak_bytes=reserved + outside,
        host_ram_bytes_per_node=pinned,
        host_pinned_bytes_per_node=pinned,
        host_process_bytes_per_node=times * sum(each["host_bytes"] for each in result.seen),
        capacity_bytes=card.capacity_bytes,
        fits=reserved + outside <= card.capacity_bytes,
        moment=at,
        breakdown=_breakdown(result, moments[at].allocated_bytes),
        top_tensors=(),
        groups_at_peak=tuple(_groups(result)),
        moments=moments,
        num_flushes=fullest["num_retries"],
        not_reliable=tuple(_unreliable(fullest)),
        assumptions=(
            _MEANS_NOTHING,
            *[alone] * (run.alone and world_size > 1),
            *fullest["notes"],
            *[_ONE_RUN] * bool(_cards(fullest)),
            about_context(card),
            *[others] * (outside > card.context_bytes),
        ),
        gpu=card.name,
        num_gpus=max(run.num_cards, world_size),
        context_bytes=outside,
        num_parameters=fullest["num_parameters"],
        num_trainable_parameters=fullest["num_trainable_parameters"],
        versions=fullest["versions"],
        cards=_cards(fullest),
        timeline=tuple((moment, now, held) for moment, now, held in fullest["timeline"]),
        planned=fullest["planned"]
        or {
            "model": f"{fullest['model']}, trained by {fullest['trainer']}",
            "rows": f"{fullest['rows']} at once{tokens}, on {world_size} ranks",
            "command": shlex.join(run.command),
        },
        **result.smallest,
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


def _breakdown(result: _Result, allocated_bytes: int) -> dict[Category, int]:
    """Return the categories at the peak; what the recording does not know is a workspace."""
    found: dict[Category, int] = {}
    for life in result.at_peak():
        category, _ = result.name_of(life)
        found[category] = found.get(category, 0) + life.num_bytes
    rest = allocated_bytes - sum(found.values())
    # A block that is released while it is counted is in the recording, and not in the peak.
    where: Category = "workspaces" if rest >= 0 else "activations"
    found[where] = found.get(where, 0) + rest
    return {name: num_bytes for name, num_bytes in found.items() if num_bytes > 0}


def _groups(result: _Result) -> Iterator[TensorsAtPeak]:
    """Yield what takes most at the peak: equal blocks of one line as one."""
    counts: Counter[tuple[int, Category, str, str, Moment]] = Counter()
    for life in result.at_peak():
        category, name = result.name_of(life)
        place, born = result.case.sorter.place(life), result.moment_of(life)
        counts[(life.num_bytes, category, part_of(name.rpartition(".")[0]), place, born)] += 1
    largest = sorted(counts.items(), key=lambda item: -item[0][0] * item[1])[:_MOST_GROUPS]
    for (num_bytes, category, part, place, born), count in largest:
        yield TensorsAtPeak(
            count=count,
            num_bytes=num_bytes,
            category=category,
            part=part,
            operation=place,
            moment=born,
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
