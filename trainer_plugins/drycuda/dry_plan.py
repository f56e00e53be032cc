"""Make a MemoryPlan of a command: run it on dry cards, and read its memory.

If the cards are too small for the command, it runs again on larger ones, to find the shortage.
"""

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from trainer_plugins.accumulation import Accumulation
from trainer_plugins.drycuda.dry_result import DryResult
from trainer_plugins.drycuda.dry_run import DryRun, run_dry
from trainer_plugins.launch.main_memory import PROCESS_BYTES, HostLimits, HostNeed
from trainer_plugins.planner.cards import (
    NO_CARD,
    Card,
    count_unified_memory,
    describe_context,
    describe_size,
)
from trainer_plugins.planner.compare.switches import source_of
from trainer_plugins.planner.plan import (
    MOMENTS,
    Category,
    MemoryPlan,
    Moment,
    MomentPeak,
    Streamed,
    TensorsAtPeak,
    part_of,
    peak_until_resume,
)
from trainer_plugins.planner.public_models import SHAPE_OF
from trainer_plugins.planner.request import PlanRequest, TrainerSource
from trainer_plugins.planner.tried import describe_error, name_untried
from trainer_plugins.record.folder import from_json
from trainer_plugins.units import count_in_words, size

_MOST_GROUPS = 10

_DECIDES = re.compile(r"libcuda|libnccl|size|buffer|alloc|MakePlan", re.IGNORECASE)
"""Functions that may affect memory; others of a computing library do not."""

_MEANS_NOTHING = (
    "dry run: kernels are counted, not run; losses and metrics are meaningless, generation"
    " runs to the maximum length, experts get equal shares"
)

_ONE_RUN = (
    "one process uses several cards: their blocks are freed in a different order each run,"
    " and the smallest card is that of this run"
)


class DryAnswer(NamedTuple):
    """Holds the result of a dry run."""

    plan: MemoryPlan
    arguments: Mapping[str, Any]  # the TrainingArguments of the run
    tokens: int  # of the longest row; 0 if rows have none
    is_fsdp: bool
    # why survival would divide no batch of "training" and of "evaluation"; "unless vouched" says
    # how the code of a custom loss computes, for which you have to vouch
    why_whole: Mapping[str, Sequence[str]] = {}


def dry_plan(run: DryRun, tell: Callable[[str], None]) -> DryAnswer:
    """Run a command on dry cards and return the memory plan of the fullest one.

    Args:
        run: the command and its cards; it may start several processes.
        tell: takes a line about the current step.

    Raises:
        PlanError: the dry card is not available here, or the command ended before it trained.
    """
    has_limit = run.card != NO_CARD and not run.card.is_unified
    unlimited = replace(run.card, capacity_bytes=NO_CARD.capacity_bytes)
    if run.request is None:
        card = "a dry card" if run.card == NO_CARD else f"a dry {run.card.name}"
        tell(f"planning: running the command on {card}")
    if run.foretells or not has_limit:
        result = run_dry(replace(run, card=unlimited), tell)
        if result.smallest is not None or not has_limit:
            return _answer(result, run)
    result = run_dry(run, tell)
    if not result.died:
        return _answer(result, run)
    num_bytes, place = result.failed_request
    tell("planning: it does not fit; running it again on a card without a limit")
    result = run_dry(replace(run, card=unlimited, snapshot=None), tell)
    return _answer(result, run, fits=False, failed_request_bytes=num_bytes, failed_request=place)


def _answer(result: DryResult, run: DryRun, **changed: Any) -> DryAnswer:
    seen, plan = result.seen[0], replace(plan_of(result, run), **changed)
    known = ("arguments", "tokens", "is_fsdp", "why_whole")
    return DryAnswer(plan, *(seen[name] for name in known))


def plan_of(result: DryResult, run: DryRun) -> MemoryPlan:
    """Return the plan of a command that ran to completion."""
    fullest, card = result.seen[0], run.card
    moments: dict[Moment, MomentPeak] = {
        moment: _highest(fullest["moments"][moment])
        for moment in MOMENTS
        if moment in fullest["moments"]
    }
    times = fullest["ranks_of_node"] if run.alone else 1
    host, host_moments = _main_memory(result, times)
    at = max(moments, key=lambda moment: moments[moment].allocated_bytes)
    reserved = max(peak.reserved_bytes for peak in moments.values())
    has_card, found = card != NO_CARD, fullest["accumulation"]
    shared = count_unified_memory(card, host.process_bytes, host_moments)
    outside = max(fullest["outside_bytes"]) + shared if has_card else 0
    needed = result.smallest.card_bytes + shared if result.smallest else reserved + outside
    shortage = run.host.shortage(host) or _load_in_one_memory(card, moments, host_moments, host)
    fits: bool | None = shortage is None and (not has_card or needed <= card.capacity_bytes)
    if not has_card and run.host == HostLimits():
        fits = None  # nothing to fit in is known
    return MemoryPlan(
        allocated_peak_bytes=moments[at].allocated_bytes,
        reserved_peak_bytes=reserved,
        nvidia_smi_peak_bytes=reserved + outside,
        host_ram_bytes_per_node=host.tensor_bytes,
        host_pinned_bytes_per_node=host.pinned_bytes,
        host_process_bytes_per_node=host.process_bytes,
        host_moments=host_moments,
        host_capacity_bytes=run.host.total_bytes,
        host_shortage=shortage,
        capacity_bytes=card.capacity_bytes if has_card else None,
        fits=fits,
        smallest_card_bytes=needed if result.smallest else None,
        fails_on_less=result.smallest.fails_on_less if result.smallest else None,
        moment=at,
        breakdown=_breakdown(result, moments[at].allocated_bytes),
        groups_at_peak=tuple(_groups(result)),
        moments=moments,
        num_flushes=fullest["num_retries"],
        not_reliable=(
            *name_untried(fullest["versions"]),
            *_name_unsent(run.request),
            *_unreliable(fullest),
        ),
        assumptions=tuple(_assumptions(fullest, run)),
        gpu=card.name if has_card else None,
        num_gpus=max(run.num_cards, fullest["world_size"]),
        context_bytes=outside,
        num_parameters=fullest["num_parameters"],
        num_trainable_parameters=fullest["num_trainable_parameters"],
        versions=fullest["versions"],
        cards=_cards(fullest),
        accumulation=from_json(Accumulation, found) if found else None,
        timeline=tuple(result.timeline),
        planned=fullest["planned"] or _describe_training(fullest, run),
        known_error=describe_error(fullest["is_quantised"]),
        streamed=from_json(Streamed, fullest["streamed"]) if fullest["streamed"] else None,
    )


def _describe_training(seen: Mapping[str, Any], run: DryRun) -> dict[str, str]:
    tokens = f" of {seen['tokens']:,} tokens" if seen["tokens"] else ""
    num_ranks = seen["world_size"]
    return {
        "model": f"{seen['model']}, trained by {seen['trainer']}",
        "batch": f"{count_in_words(seen['rows'], 'row')} at once{tokens}, on"
        f" {count_in_words(num_ranks, 'rank')}",
        "command": shlex.join(run.command),
        **({"quantised": "its base"} if seen["is_quantised"] else {}),
        **(
            {"missed": f"the training in {seen['missed']} is not counted"} if seen["missed"] else {}
        ),
        **({"card": run.card.guess} if run.card.guess else {}),
    }


def _main_memory(result: DryResult, times: int) -> tuple[HostNeed, dict[Moment, int]]:
    """Return the main memory of all ranks on a machine, and the tensors by moment.

    There are `times` as many ranks as ran.
    """
    held = {name: sum(seen["host"].get(name, 0) for seen in result.seen) for name in MOMENTS}
    first, steady = result.seen[0], held["optimizer step"]
    others = {**held, **dict.fromkeys(first["of_first_rank"], steady)}
    others["load"] = min(held["load"], max(others["load"], first["cast_bytes"]))
    all_ranks = {name: held[name] + (times - 1) * others[name] for name in MOMENTS}
    moments = {name: num_bytes for name, num_bytes in all_ranks.items() if num_bytes}
    pinned = sum(seen["counters"]["bytes pinned at most"] for seen in result.seen)
    need = HostNeed(
        tensor_bytes=max(moments.values(), default=0),
        pinned_bytes=times * pinned,
        num_ranks=times * len(result.seen),
        until_resume_bytes=peak_until_resume(moments),
        rank_bytes=max(PROCESS_BYTES, *(seen["process_bytes"] for seen in result.seen)),
    )
    return need, moments


def _load_in_one_memory(
    card: Card,
    moments: Mapping[Moment, MomentPeak],
    host_moments: Mapping[Moment, int],
    host: HostNeed,
) -> str | None:
    """Describe the shortage while weights are in main memory and on a card that shares it."""
    if not card.is_unified or "load" not in moments:
        return None
    in_main_memory = host_moments.get("load", 0) + host.process_bytes
    need = moments["load"].reserved_bytes + card.context_bytes + in_main_memory
    if need <= card.capacity_bytes:
        return None
    return (
        f"loading needs {size(need)} of the shared memory, which has {size(card.capacity_bytes)}:"
        " the model is in main memory and on the card. Load it onto the card (device_map)"
    )


def _assumptions(seen: Mapping[str, Any], run: DryRun) -> Iterator[str]:
    world_size, outside = seen["world_size"], max(seen["outside_bytes"])
    yield _MEANS_NOTHING
    if run.alone and world_size > 1:
        yield f"only rank 0 of {world_size} ran; the other ranks are assumed to behave like it"
    yield from seen["notes"]
    if run.of_config is not None and (name := source_of(run.of_config).config.get(SHAPE_OF)):
        yield f"{name} has the shape that this package lists: its config.json is not here"
    if seen["missed"]:
        yield f"the program has not come to the training in {seen['missed']}"
    if _cards(seen):
        yield _ONE_RUN
    if run.card != NO_CARD:
        yield from filter(None, [describe_size(run.card), describe_context(run.card)])
    if run.card.is_unified:
        yield (
            f"{run.card.name} shares main memory: tensors, Python and its libraries count as"
            " outside the allocator, and other programs are not counted"
        )
    if outside > run.card.context_bytes:
        yield (
            f"other processes hold {size(outside - run.card.context_bytes)} of the card: a launcher"
            " that has touched it has a context there"
        )


def _highest(peaks: Iterable[tuple[int, int]]) -> MomentPeak:
    allocated, reserved = zip(*peaks, strict=True)
    return MomentPeak(allocated_bytes=max(allocated), reserved_bytes=max(reserved))


def _cards(seen: Mapping[str, Any]) -> tuple[MomentPeak, ...]:
    cards = [_highest(peaks) for peaks in zip(*seen["moments"].values(), strict=True)]
    return tuple(cards) if sum(card.reserved_bytes > 0 for card in cards) > 1 else ()


def _breakdown(result: DryResult, allocated_bytes: int) -> dict[Category, int]:
    """Return the categories at the peak; memory missing from the recording counts as workspaces."""
    found: dict[Category, int] = {}
    for life in result.find_peak_blocks():
        category, _ = result.name_of(life)
        found[category] = found.get(category, 0) + life.num_bytes
    rest = allocated_bytes - sum(found.values())
    # A block released during the count is in the recording, but not in the peak.
    where: Category = "workspaces" if rest >= 0 else "activations"
    found[where] = found.get(where, 0) + rest
    return {name: num_bytes for name, num_bytes in found.items() if num_bytes > 0}


def _groups(result: DryResult) -> Iterator[TensorsAtPeak]:
    """Yield the largest tensors at the peak, equal blocks of one line as one."""
    counts: Counter[tuple[int, Category, str, str, Moment]] = Counter()
    for life in result.find_peak_blocks():
        category, name = result.name_of(life)
        place, born = result.case.sorter.place(life), result.moment_of(life.birth)
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
        )


def _name_unsent(request: PlanRequest | None) -> Iterator[str]:
    """Name the parts of a Trainer that the dry run did not have."""
    if request is None or not isinstance(request.source, TrainerSource):
        return
    yield from request.source.unread
    if names := ", ".join(request.source.left_out):
        yield f"attributes of the Trainer that cannot be pickled were left out: {names}"


def _unreliable(seen: Mapping[str, Any]) -> Iterator[str]:
    unwritten = {
        name.split(" ", 1)[1]: number
        for name, number in seen["counters"].items()
        if name.startswith("unwritten ") and _DECIDES.search(name)
    }
    if unwritten:
        calls = ", ".join(f"{name} ({number:,})" for name, number in sorted(unwritten.items())[:5])
        yield f"the dry card only counts calls of some functions that may take memory: {calls}"
    for name, number in seen["unknown_shapes"].items():
        yield f"{number:,} results of {name} were empty: their shape depends on values"
    if seen["num_ooms"] and not seen["died"]:
        yield f"it ran out of memory {seen['num_ooms']} times and continued"
    if seen["num_retries"]:
        yield f"the allocator released its cache {seen['num_retries']} times to continue"
