"""Apply the allocator's rules of a card to a rehearsal, and make a plan of it."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.allocator.model import AllocatorRules, first_of_a_size
from trainer_plugins.allocator.settings import parse
from trainer_plugins.launch.main_memory import HostLimits
from trainer_plugins.planner import progress
from trainer_plugins.planner.cards import Card, about_context, about_size, in_one_memory
from trainer_plugins.planner.plan import (
    Category,
    MemoryPlan,
    MomentPeak,
    PlanError,
    TensorAtPeak,
    TensorsAtPeak,
    part_of,
)
from trainer_plugins.planner.rehearse.watch import Watched
from trainer_plugins.planner.request import PlanRequest
from trainer_plugins.planner.tracing.events import Storage, Trace
from trainer_plugins.planner.tracing.replay import Replay, by_card, live_at_peak, replay
from trainer_plugins.planner.tried import installed, known_error, untried
from trainer_plugins.units import size

_TOP_TENSORS = 10
_DELTA = ("aten::baddbmm", "aten::einsum", "aten::bmm")  # peft/tuners/lora/layer.py, ParamWrapper
_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}

# storages that are live at the peak, with the sizes of their blocks
_Live: TypeAlias = list[tuple[Storage, int]]


def rules_of(request: PlanRequest) -> AllocatorRules:
    """Read the allocator settings of a request; PlanError if they are wrong or not modelled."""
    rules = AllocatorRules()
    try:
        if request.allocator:
            rules = AllocatorRules.of(parse(request.allocator))
    except ValueError as error:
        raise PlanError(f"allocator settings: {error}") from error
    if request.device == "simgpu":  # it has rules of its own, whatever the settings say
        return AllocatorRules(segments="falling")
    return replace(rules, first_of_a_size=first_of_a_size(installed()["torch"]))


def judge(request: PlanRequest, watched: Watched, rules: AllocatorRules) -> MemoryPlan:
    """Replay a rehearsal through the allocator; of several cards, plan the one that is worst."""
    progress.step("replaying its allocations")
    plans = {
        card: _judge_card(request, replace(watched, trace=trace), rules)
        for card, trace in by_card(watched.trace).items()
    }
    worst = max(
        plans, key=lambda card: (plans[card].fits is False, plans[card].reserved_peak_bytes)
    )
    if len(plans) == 1:
        return plans[worst]
    nothing = MomentPeak(allocated_bytes=0, reserved_bytes=0)
    peaks = {
        card: MomentPeak(
            allocated_bytes=plan.allocated_peak_bytes, reserved_bytes=plan.reserved_peak_bytes
        )
        for card, plan in plans.items()
    }
    each = ", ".join(f"card {card}: {size(peak.reserved_bytes)}" for card, peak in peaks.items())
    line = (
        "one process spreads the model over its cards (device_map), which are assumed to be equal;"
        f" they reserve at the peak {each}, and all other figures are of card {worst}"
    )
    return replace(
        plans[worst],
        cards=tuple(peaks.get(card, nothing) for card in range(max(plans) + 1)),
        assumptions=(*plans[worst].assumptions, line),
    )


def _judge_card(request: PlanRequest, watched: Watched, rules: AllocatorRules) -> MemoryPlan:
    card, trace, versions = request.card, watched.trace, installed()
    unlimited = replay(trace, None, rules)
    on_card, context = None, 0
    in_main_memory = 0
    if card is not None:
        in_main_memory = in_one_memory(card, watched.host.process_bytes, trace.host_peaks)
        context = card.context_bytes + in_main_memory
        on_card = replay(trace, card.capacity_bytes - context, rules)
    fits_card = on_card is not None and on_card.failed is None
    shown = on_card if on_card is not None and fits_card else unlimited
    live = live_at_peak(trace, unlimited)
    planned, said = _about_experts(request, watched, live)
    shortage = request.host.shortage(watched.host) or _load_in_one_memory(card, watched, shown)
    fits = None
    if on_card is not None or request.host != HostLimits():
        fits = shortage is None and (on_card is None or fits_card)
    return MemoryPlan(
        allocated_peak_bytes=unlimited.allocated_peak_bytes,
        reserved_peak_bytes=shown.reserved_peak_bytes,
        nvidia_smi_peak_bytes=shown.reserved_peak_bytes + context,
        host_ram_bytes_per_node=watched.host.tensor_bytes,
        host_pinned_bytes_per_node=watched.host.pinned_bytes,
        host_process_bytes_per_node=watched.host.process_bytes,
        host_moments=dict(trace.host_peaks),
        host_capacity_bytes=request.host.total_bytes,
        host_shortage=shortage,
        capacity_bytes=card.capacity_bytes if card is not None else None,
        fits=fits,
        moment=unlimited.peak_moment,
        breakdown=_breakdown(live),
        top_tensors=tuple(_tensor(*each) for each in live[:_TOP_TENSORS]),
        groups_at_peak=_groups(live),
        planned={**planned, "engine": "fake tensors"},
        streamed=watched.streamed,
        accumulation=watched.accumulation,
        moments=shown.moments,
        num_flushes=on_card.num_flushes if on_card is not None else 0,
        failed_request_bytes=on_card.failed_request_bytes if on_card is not None else None,
        failed_request=_failed_request(on_card),
        not_predicted=watched.not_predicted,
        not_reliable=(*untried(versions), *watched.not_reliable),
        assumptions=(
            *watched.assumptions,
            *said,
            *_about_card(card, in_main_memory),
            *_about_order(trace, rules, unlimited),
        ),
        known_error=_known_error(request, watched, versions),
        device=request.device,
        gpu=card.name if card is not None else None,
        num_gpus=watched.num_gpus,
        context_bytes=context,
        num_parameters=watched.num_parameters,
        num_trainable_parameters=watched.num_trainable_parameters,
        versions=versions,
        timeline=shown.timeline,
    )


def _known_error(request: PlanRequest, watched: Watched, versions: Mapping[str, str]) -> str:
    if request.device == "cuda":
        return known_error(versions, is_quantised="quantised" in watched.planned)
    return "in the tests, plans for the simulated card are within 1 %"


def _breakdown(live: _Live) -> dict[Category, int]:
    found: dict[Category, int] = defaultdict(int)
    for storage, num_bytes in live:
        found[storage.category] += num_bytes
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def _groups(live: _Live) -> tuple[TensorsAtPeak, ...]:
    """Put storages together that are alike, those with the most bytes first."""
    alike = Counter(
        TensorsAtPeak(
            count=1,
            num_bytes=num_bytes,
            category=storage.category,
            part=part_of(storage.module),
            operation=storage.operation,
            moment=storage.moment,
            dtype=storage.dtype,
        )
        for storage, num_bytes in live
    )
    found = [replace(one, count=count) for one, count in alike.items()]
    return tuple(sorted(found, key=lambda each: -each.total_bytes)[:_TOP_TENSORS])


def _tensor(storage: Storage, num_bytes: int) -> TensorAtPeak:
    return TensorAtPeak(
        num_bytes=num_bytes,
        category=storage.category,
        module=storage.module,
        operation=storage.operation,
        moment=storage.moment,
        shape=storage.shape,
        dtype=storage.dtype,
    )


def _failed_request(on_card: Replay | None) -> str | None:
    if on_card is None or on_card.failed is None:
        return None
    failed = on_card.failed
    return f"{failed.operation} in {failed.module or 'the model'}, {failed.moment}"


def _about_experts(
    request: PlanRequest, watched: Watched, live: _Live
) -> tuple[Mapping[str, str], list[str]]:
    """Return what was planned, and lines about experts: not quantised, or changed by an adapter."""
    experts = [
        (storage, num_bytes)
        for storage, num_bytes in live
        if "experts" in storage.module.split(".")
    ]
    lines = []
    deltas = [num_bytes for each, num_bytes in experts if each.operation in _DELTA]
    if deltas and (getattr(request.source, "peft", None) or {}).get("target_parameters"):
        lines.append(
            f"{size(sum(deltas))} at the peak are what an adapter adds to experts: PEFT makes it"
            f" for all experts of a layer, however few rows there are;"
            f" {advice.NO_EXPERTS.flag(Door.CODE)}"
        )
    frozen = [
        (storage.dtype, num_bytes)
        for storage, num_bytes in experts
        if storage.category == "frozen weights" and storage.dtype in _BITS
    ]
    if "quantised" not in watched.planned or not frozen:
        return watched.planned, lines
    dtype, _ = frozen[0]
    many = f"{size(sum(num_bytes for _, num_bytes in frozen))} of experts"
    line = (
        f"{many} stay in {_BITS[dtype]} bits: bitsandbytes quantises layers of the class Linear,"
        " and these are one tensor for all experts of a layer"
    )
    if dtype == "float32" and getattr(request.source, "prepares_kbit", False):
        line += "; --no-prepare-kbit leaves them in the dtype that they are loaded in"
    line += f"; {advice.QUANTISED_EXPERTS.flag(Door.CODE)}"
    quantised = f"{watched.planned['quantised']}, except {many} in {_BITS[dtype]} bits"
    return {**watched.planned, "quantised": quantised}, [*lines, line]


def _about_order(trace: Trace, rules: AllocatorRules, unlimited: Replay) -> list[str]:
    """Say the other peak, where the addresses that another driver gives out lead to one."""
    if rules.segments != "chunks" or rules.expandable_segments:
        return []
    rising = replay(trace, None, replace(rules, segments="rising")).reserved_peak_bytes
    low, high = sorted((unlimited.reserved_peak_bytes, rising))
    if size(low) == size(high):
        return []
    return [
        f"the driver places new segments as on Linux; placed as under Windows and WSL2 they reserve"
        f" {size(rising)} at the peak on an unlimited card, so it is between {size(low)} and"
        f" {size(high)}"
    ]


def _load_in_one_memory(card: Card | None, watched: Watched, shown: Replay) -> str | None:
    """Say what is short while weights are in main memory and on a card that has the same memory."""
    load = shown.moments.get("load")
    if card is None or not card.is_unified or load is None:
        return None
    in_main_memory = watched.trace.host_peaks.get("load", 0) + watched.host.process_bytes
    need = load.reserved_bytes + card.context_bytes + in_main_memory
    if need <= card.capacity_bytes:
        return None
    return (
        f"the load needs {size(need)} of the one memory, which has {size(card.capacity_bytes)}: the"
        " model is in main memory and on the card. Load it onto the card (device_map)"
    )


def _about_card(card: Card | None, in_main_memory: int) -> list[str]:
    if card is None:
        return []
    lines = [about_size(card), about_context(card) if card.context_bytes else ""]
    if card.is_unified:
        lines.append(
            f"{card.name} is the main memory too: {size(in_main_memory)} of tensors, Python and its"
            " libraries are counted as outside the allocator, and no other program is"
        )
    return [line for line in lines if line]
