"""Joins the readings of a rank to as few stretches as a picture can show, and loses no peak."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

from trainer_plugins.record.timeline import Entry, Sample

MOST = 240
"""A picture of a thousand pixels shows no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Holds the highest figures of one reading, or of neighbours; sizes in bytes.

    A reading covers everything since the one before.
    """

    began_seconds: float
    ended_seconds: float  # since the beginning of the picture
    first_step: int
    last_step: int
    moments: tuple[str, ...]
    outside_bytes: int  # memory outside torch; the next three include it
    kept_bytes: int  # with the tensors that were alive when it was read
    peak_bytes: int  # with the most that tensors took at once
    used_bytes: int  # with the cache
    peak_allocated_bytes: int
    reserved_bytes: int

    @property
    def steps(self) -> str:
        """Name its optimizer steps."""
        one, other = self.first_step, self.last_step
        return f"step {one}" if one == other else f"steps {one} to {other}"


def stretches_of(entries: Iterable[Entry], began_seconds: float, most: int = MOST) -> list[Stretch]:
    """Join the readings of one rank to no more than `most` stretches.

    Each is long enough to be seen, and has the highest of each figure.
    """
    alone = [*_alone(entries, began_seconds)]
    if not alone:
        return []
    shortest = alone[-1].ended_seconds / most
    joined: list[Stretch] = []
    waiting: list[Stretch] = []
    for each in alone:
        waiting.append(each)
        if each.ended_seconds - waiting[0].began_seconds >= shortest:
            joined.append(_joined(waiting))
            waiting = []
    if waiting:
        joined[-1:] = [_joined([*joined[-1:], *waiting])]
    return joined


def _alone(entries: Iterable[Entry], began_seconds: float) -> Iterator[Stretch]:
    before = 0.0
    for entry in entries:
        if not isinstance(entry, Sample):
            continue
        reading, outside = entry.reading, entry.reading.non_torch_bytes
        peak = outside + max(reading.peak_allocated_bytes, reading.allocated_bytes)
        until = max(before, entry.time_seconds - began_seconds)  # a clock may be set back
        yield Stretch(
            began_seconds=before,
            ended_seconds=until,
            first_step=entry.step,
            last_step=entry.step,
            moments=(entry.moment,),
            outside_bytes=outside,
            kept_bytes=outside + reading.allocated_bytes,
            peak_bytes=peak,
            used_bytes=max(peak, outside + reading.reserved_bytes),
            peak_allocated_bytes=reading.peak_allocated_bytes,
            reserved_bytes=reading.reserved_bytes,
        )
        before = until


def _joined(some: Sequence[Stretch]) -> Stretch:
    sizes = [each.name for each in fields(Stretch) if each.name.endswith("_bytes")]
    return replace(
        some[0],
        ended_seconds=some[-1].ended_seconds,
        last_step=some[-1].last_step,
        moments=tuple(dict.fromkeys(moment for each in some for moment in each.moments)),
        **{name: max(getattr(each, name) for each in some) for name in sizes},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Holds how long steps took within a stretch of time."""

    began_seconds: float
    ended_seconds: float
    num_steps: int
    busy_seconds: float  # the time of these steps, without evaluations and saves between them
    slowest_seconds: float
    slowest_step: int
    num_tokens: int  # tokens of these steps on all ranks; 0 if they were not counted


def paces_of(entries: Iterable[Entry], began_seconds: float, most: int = MOST) -> list[Pace]:
    """Measure the steps of one rank between its readings, joined as stretches are.

    A step lasts from the reading before it to its own, so the time of an evaluation or a save does
    not count. The first step of a run is unknown if nothing was read when the run began.
    """
    alone = [*_paces(entries, began_seconds)]
    shortest = alone[-1].ended_seconds / most if alone else 0.0
    joined: list[Pace] = []
    for each in alone:
        last = joined[-1] if joined else None
        if last is None or last.ended_seconds - last.began_seconds >= shortest:
            joined.append(each)
            continue
        slower = max(last, each, key=lambda pace: pace.slowest_seconds)
        joined[-1] = replace(
            last,
            ended_seconds=each.ended_seconds,
            num_steps=last.num_steps + each.num_steps,
            busy_seconds=last.busy_seconds + each.busy_seconds,
            slowest_seconds=slower.slowest_seconds,
            slowest_step=slower.slowest_step,
            num_tokens=last.num_tokens + each.num_tokens,
        )
    return joined


def _paces(entries: Iterable[Entry], began_seconds: float) -> Iterator[Pace]:
    before: Sample | None = None
    for entry in entries:
        if not isinstance(entry, Sample) or entry.moment == "generate":
            continue  # a generation is part of the step, or of the evaluation, that comes after it
        if entry.moment == "train" and before is not None:
            seconds, num = entry.time_seconds - before.time_seconds, entry.step - before.step
            if seconds > 0 and num > 0:
                yield Pace(
                    began_seconds=before.time_seconds - began_seconds,
                    ended_seconds=entry.time_seconds - began_seconds,
                    num_steps=num,
                    busy_seconds=seconds,
                    slowest_seconds=seconds / num,
                    slowest_step=entry.step,
                    num_tokens=max(0, entry.num_tokens_seen - before.num_tokens_seen),
                )
        before = entry
