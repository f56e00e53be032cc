"""Replay a trace through the allocator's rules: peaks by moment, live storages, what fails."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from trainer_plugins.allocator.model import AllocatorFull, AllocatorModel, AllocatorRules, Block
from trainer_plugins.planner.plan import MOMENTS, Moment, MomentPeak, known_moment
from trainer_plugins.planner.tracing.events import (
    ALLOC,
    EMPTY_CACHE,
    FREE,
    LEFT,
    Event,
    Storage,
    Trace,
)

_TIMELINE_POINTS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Holds what an allocator makes of a trace. Sizes in bytes."""

    allocated_peak_bytes: int
    reserved_peak_bytes: int
    reserved_bytes: int  # in the end
    peak_moment: Moment
    peak_event: int  # the index of the event at the allocated peak; -1 if nothing was allocated
    moments: Mapping[Moment, MomentPeak]
    num_flushes: int
    failed: Storage | None = None  # the card refused it; None if all fit
    failed_request_bytes: int | None = None
    # of the block that each storage got, by the index of the storage
    block_bytes: Mapping[int, int] = field(repr=False)
    timeline: tuple[tuple[Moment, int, int], ...] = field(repr=False)  # see `MemoryPlan.timeline`


def by_card(trace: Trace) -> dict[int, Trace]:
    """Divide a trace by card. An event without a storage belongs to every card."""
    storages = trace.storages
    cards = sorted({storage.card for storage in storages}) or [0]
    if len(cards) == 1:
        return {cards[0]: trace}
    return {
        card: replace(
            trace,
            events=tuple(
                event
                for event in trace.events
                if event.number < 0 or storages[event.number].card == card
            ),
        )
        for card in cards
    }


def replay(
    trace: Trace, capacity_bytes: int | None = None, rules: AllocatorRules | None = None
) -> Replay:
    """Replay the events of one card; without a capacity it is unlimited."""
    model = AllocatorModel(capacity_bytes, rules)
    blocks: dict[int, Block] = {}
    left: dict[int, int] = {}
    block_bytes: dict[int, int] = {}
    peaks: dict[Moment, MomentPeak] = {}
    timeline: list[tuple[Moment, int, int]] = []
    highest, peak_event, peak_moment = 0, -1, MOMENTS[0]
    moment: Moment | None = None
    failed, failed_bytes = None, None
    interval = max(1, len(trace.events) // _TIMELINE_POINTS)
    for position, event in enumerate(trace.events):
        if event.moment != moment:
            _note_peaks(peaks, moment, model)
            model.reset_peaks()
            moment = known_moment(event.moment)  # the plan would leave out an unknown one
        if event.kind == ALLOC:
            storage = trace.storages[event.number]
            try:
                block = blocks[event.number] = model.malloc(storage.num_bytes, storage.stream)
            except AllocatorFull as full:
                failed, failed_bytes = storage, full.requested_bytes
                break
            block_bytes[event.number] = block.size_bytes
            if model.allocated_bytes > highest:
                highest, peak_event, peak_moment = model.allocated_bytes, position, event.moment
        else:
            _give_back(model, event, blocks, left)
        point = (event.moment, model.allocated_bytes, model.reserved_bytes)
        if position % interval == 0 or event.moment != timeline[-1][0]:
            timeline.append(point)
        else:  # keep the maximum of each stretch, so that no peak is lost
            timeline[-1] = (
                event.moment,
                max(point[1], timeline[-1][1]),
                max(point[2], timeline[-1][2]),
            )
    _note_peaks(peaks, moment, model)
    return Replay(
        allocated_peak_bytes=highest,
        reserved_peak_bytes=max((peak.reserved_bytes for peak in peaks.values()), default=0),
        reserved_bytes=model.reserved_bytes,
        peak_moment=peak_moment,
        peak_event=peak_event,
        moments={name: peaks[name] for name in MOMENTS if name in peaks},
        num_flushes=model.num_retries,
        failed=failed,
        failed_request_bytes=failed_bytes,
        block_bytes=block_bytes,
        timeline=tuple(timeline),
    )


def _give_back(
    model: AllocatorModel, event: Event, blocks: dict[int, Block], left: dict[int, int]
) -> None:
    if event.kind == LEFT:
        left[event.number] = model.leave(blocks.pop(event.number))
    elif event.kind == FREE and event.number in left:
        model.come_back(left.pop(event.number))
    elif event.kind == FREE:
        model.free(blocks.pop(event.number))
    elif event.kind == EMPTY_CACHE:
        model.empty_cache()


def live_at_peak(trace: Trace, replayed: Replay) -> list[tuple[Storage, int]]:
    """Return the storages that are live at the peak with their block sizes, the largest first."""
    live: dict[int, Storage] = {}
    for event in trace.events[: replayed.peak_event + 1]:
        if event.kind == ALLOC:
            live[event.number] = trace.storages[event.number]
        elif event.kind in (LEFT, FREE):
            live.pop(event.number, None)
    found = [(storage, replayed.block_bytes[index]) for index, storage in live.items()]
    return sorted(found, key=lambda pair: -pair[1])


def _note_peaks(
    peaks: dict[Moment, MomentPeak], moment: Moment | None, model: AllocatorModel
) -> None:
    if moment is None:
        return
    before = peaks.get(moment, MomentPeak(allocated_bytes=0, reserved_bytes=0))
    peaks[moment] = MomentPeak(
        allocated_bytes=max(before.allocated_bytes, model.peak_allocated_bytes),
        reserved_bytes=max(before.reserved_bytes, model.peak_reserved_bytes),
    )
