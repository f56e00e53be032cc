"""Makes a MemoryPlan of a command: runs it on dry cards, and reads what it needed.

If the cards are too small for the command, it runs once more on larger ones, to say by how much.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer_plugins.dry.dry_cuda import DryCuda, DryCudaUnavailable
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

_MEANS_NOTHING = (
    "dry run: kernels were counted and not run; losses and metrics mean nothing, tokens are"
    " generated to the longest, experts get equal shares"
)


def dry_plan(
    command: Sequence[str],
    card: Card,
    num_cards: int = 1,
    *,
    num_steps: int = 2,
    timeout_seconds: float = 600,
) -> MemoryPlan:
    """Run a command on dry cards and return what it needs of the fullest one.

    Args:
        command: what the user types; it may start several processes.
        card: the kind of card.
        num_cards: how many of them the machine has.
        num_steps: optimizer steps to run.
        timeout_seconds: after which the command is ended.

    Raises:
        PlanError: the dry card cannot be had here, or the command ended before it trained.
    """
    result = _run(command, card, num_cards, num_steps, timeout_seconds)
    is_too_large = any(each["num_ooms"] for each in result.seen)
    if not is_too_large:
        return _plan(result, card, num_cards)
    failed = _failed_request(result)
    unlimited = replace(card, capacity_bytes=_UNLIMITED_BYTES)
    result = _run(command, unlimited, num_cards, num_steps, timeout_seconds)
    return replace(_plan(result, card, num_cards), fits=False, **failed)


class _Result:
    """Holds what the processes of a command have seen, the fullest one first."""

    def __init__(self, seen: list[dict[str, Any]], case: SnapshotCase) -> None:
        self.seen, self.case = seen, case


def _run(
    command: Sequence[str], card: Card, num_cards: int, num_steps: int, timeout_seconds: float
) -> _Result:
    try:
        made = DryCuda(card, num_cards)
    except DryCudaUnavailable as error:
        raise PlanError(str(error)) from error
    with made as dry:
        environment = {**dry.environment(), "TRAINER_PLUGINS_DRY_STEPS": str(num_steps)}
        log = dry.folder / "log"
        with log.open("w") as output:
            try:
                code = subprocess.run(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    timeout=timeout_seconds,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired as error:
                raise PlanError(f"the command took more than {timeout_seconds:.0f} s") from error
            except OSError as error:
                raise PlanError(f"the command cannot be run: {error}") from error
        seen = [json.loads(path.read_text()) for path in dry.folder.glob("seen-*.json")]
        if not seen:
            raise PlanError(_never_trained(code, log))
        seen.sort(key=_reserved_peak, reverse=True)
        return _Result(seen, case_of(dry.folder / f"snapshot-{seen[0]['rank']}.pickle"))


def _reserved_peak(seen: Mapping[str, Any]) -> int:
    moments: Mapping[str, list[tuple[int, int]]] = seen["moments"]
    return max(reserved for peaks in moments.values() for _, reserved in peaks)


def _never_trained(code: int, log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
    said = "".join(f"\n    {line}" for line in lines)
    return f"the command ended with exit code {code} before a Trainer had trained:{said}"


def _failed_request(result: _Result) -> dict[str, Any]:
    oom = result.case.oom
    return {
        "failed_request_bytes": oom.num_bytes if oom is not None else 0,
        "failed_request": result.case.request.place if oom is not None else None,
    }


def _plan(result: _Result, card: Card, num_cards: int) -> MemoryPlan:
    fullest = result.seen[0]
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
        host_process_bytes_per_node=sum(each["host_bytes"] for each in result.seen),
        capacity_bytes=card.capacity_bytes,
        fits=reserved + card.context_bytes <= card.capacity_bytes,
        moment=at,
        breakdown=_breakdown(result.case, moments[at].allocated_bytes),
        top_tensors=(),
        groups_at_peak=tuple(_groups(result.case, at)),
        moments=moments,
        num_flushes=fullest["num_retries"],
        not_reliable=tuple(_unreliable(fullest)),
        assumptions=(_MEANS_NOTHING, *fullest["notes"], about_context(card)),
        gpu=card.name,
        num_gpus=max(num_cards, fullest["world_size"]),
        context_bytes=card.context_bytes,
        num_parameters=fullest["num_parameters"],
        num_trainable_parameters=fullest["num_trainable_parameters"],
        versions=fullest["versions"],
    )


def _breakdown(case: SnapshotCase, allocated_bytes: int) -> dict[Category, int]:
    """Return the categories at the peak; what the recording does not know is a workspace."""
    found: dict[Category, int] = {}
    for name, num_bytes in case.held.categories.items():
        category = _CATEGORIES[name]
        found[category] = found.get(category, 0) + num_bytes
    rest = allocated_bytes - sum(found.values())
    found["workspaces"] = found.get("workspaces", 0) + rest
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
        if name.startswith("unwritten ") and not name.split(" ")[1].startswith("libcublas")
    }
    if unwritten:
        calls = ", ".join(f"{name} ({number:,})" for name, number in sorted(unwritten.items())[:5])
        yield f"functions without code of their own were called: {calls}"
    for name, number in seen["unknown_shapes"].items():
        yield f"{number:,} results of {name} have a shape that no value decided: they are empty"
    if seen["num_retries"]:
        yield f"the allocator released its cache {seen['num_retries']} times to go on"


if __name__ == "__main__":
    from trainer_plugins.planner.cards import card_of

    made_plan = dry_plan(sys.argv[2:], card_of(sys.argv[1]))
    print(made_plan.to_json())
    print(size(made_plan.reserved_peak_bytes))
