"""Gives the numbers of a recorded out-of-memory error, for other programs."""

from trainer_plugins.explain.answer import Allocation, Numbers
from trainer_plugins.explain.run.case import Case


def numbers_of(case: Case) -> Numbers:
    """Return what the error and the reading after it state."""
    record = case.record
    alive, reading = record.alive, record.reading
    is_known = case.total > 0
    index = record.run.device.rpartition(":")[2]
    return Numbers(
        rank=record.rank,
        card=int(index) if index.isdecimal() else record.error.device,
        card_name=record.run.card,
        call=record.call,
        moment=record.moment,
        part=record.part,
        step=record.step,
        requested_bytes=record.error.requested_bytes,
        capacity_bytes=case.total if is_known else None,
        limit_bytes=record.error.limit_bytes,
        free_bytes=case.free if is_known else None,
        allocated_bytes=case.live if is_known else None,
        reserved_bytes=case.live + case.unused if is_known else None,
        unused_bytes=case.unused if is_known else None,
        others_bytes=case.outside if is_known else None,
        peak_allocated_bytes=None if reading is None else reading.peak_allocated_bytes,
        categories={}
        if alive is None
        else {**alive.category_bytes, "saved by autograd": alive.hidden_bytes},
        allocations=()
        if alive is None
        else tuple(
            Allocation(
                num_bytes=each.num_bytes,
                requested_bytes=each.num_bytes,
                place=each.holder,
                shape=each.shape,
            )
            for each in alive.largest[:10]
        ),
        frames=record.frames[::-1],
        processes=record.processes or (),
    )
