"""Sums up what the ranks of a run noted: a line a moment, what was released, findings once."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainer_plugins.finding import Finding
from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.history import Run
from trainer_plugins.record.timeline import Beginning, Entry, Failure, Flush, Remark, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentPeak:
    """Holds the peak of one moment on the fullest rank, beside the least full one."""

    moment: str
    rank: int
    """The fullest rank; the next five are its own."""

    device: str
    peak_bytes: int
    pressure: float
    total_bytes: int
    reserved_bytes: int
    least_rank: int
    least_pressure: float
    """How full its card was; more of that may be in tensors than on the fullest rank."""

    least_peak_bytes: int
    num_readings: int
    """Of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Releases:
    """Holds what all ranks gave back, and the time of the rank that waited longest."""

    num: int
    released_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """Holds a finding, and where else the same was found with other figures."""

    finding: Finding
    """The worst of them, by its amount."""

    times: int
    ranks: tuple[int, ...]
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Sums up one run."""

    steps: tuple[int, int]
    seconds: tuple[float, float]
    ranks: tuple[int, ...]
    has_end: bool
    """Whether each rank noted its end, or never began to train."""

    failures: tuple[Failure, ...]
    peaks: tuple[MomentPeak, ...]
    releases: Releases
    findings: tuple[Repeated, ...]


def summary(run: Run) -> RunSummary:
    """Sum up a run."""
    timelines = run.timelines
    return RunSummary(
        steps=run.steps,
        seconds=run.seconds,
        ranks=tuple(timelines),
        has_end=all(map(has_end, timelines.values())),
        failures=tuple(
            entry
            for entries in timelines.values()
            for entry in entries
            if isinstance(entry, Failure)
        ),
        peaks=tuple(peaks(timelines)),
        releases=releases(timelines),
        findings=tuple(repeated(timelines)),
    )


def has_end(entries: Iterable[Entry]) -> bool:
    """Return whether a rank noted the end of its training, or never began one."""
    moments = {entry.moment for entry in entries if isinstance(entry, Sample)}
    began = any(isinstance(entry, Beginning) for entry in entries)
    return "end" in moments or not (began or moments & {"begin", "train"})


def has_failed(entries: Iterable[Entry]) -> bool:
    """Return whether a rank noted an error."""
    return any(isinstance(entry, Failure) for entry in entries)


def peaks(timelines: Mapping[int, Sequence[Entry]]) -> list[MomentPeak]:
    """Return the peak of each moment, in the order in which the moments came."""
    moments: dict[str, dict[int, list[Sample]]] = {}
    for rank, entries in sorted(timelines.items()):
        for entry in entries:
            if isinstance(entry, Sample):
                moments.setdefault(entry.moment, {}).setdefault(rank, []).append(entry)
    return [_peak(moment, by_rank) for moment, by_rank in moments.items()]


def _peak(moment: str, by_rank: Mapping[int, Sequence[Sample]]) -> MomentPeak:
    highest = {rank: _highest(samples) for rank, samples in by_rank.items()}
    worst = max(highest, key=lambda rank: highest[rank].pressure)
    least = min(highest, key=lambda rank: highest[rank].pressure)
    return MomentPeak(
        moment=moment,
        rank=worst,
        device=highest[worst].device,
        peak_bytes=_largest(by_rank[worst]),
        pressure=highest[worst].pressure,
        total_bytes=highest[worst].total_bytes,
        reserved_bytes=max(sample.reading.reserved_bytes for sample in by_rank[worst]),
        least_rank=least,
        least_pressure=highest[least].pressure,
        least_peak_bytes=_largest(by_rank[least]),
        num_readings=sum(each.num_readings for samples in by_rank.values() for each in samples),
    )


def _highest(samples: Sequence[Sample]) -> MemoryReading:
    return max((sample.reading for sample in samples), key=lambda reading: reading.pressure)


def _largest(samples: Sequence[Sample]) -> int:
    return max(sample.reading.peak_allocated_bytes for sample in samples)


def releases(timelines: Mapping[int, Sequence[Entry]]) -> Releases:
    """Sum up what was given back."""
    flushes = [
        [entry for entry in entries if isinstance(entry, Flush)] for entries in timelines.values()
    ]
    each = [flush for of_rank in flushes for flush in of_rank]
    return Releases(
        num=sum(flush.num_releases for flush in each),
        released_bytes=sum(flush.released_bytes for flush in each),
        seconds=max(sum(flush.seconds for flush in of_rank) for of_rank in flushes),
    )


def repeated(timelines: Mapping[int, Sequence[Entry]]) -> list[Repeated]:
    """Merge the findings that are equal but for their figures, those of the first step first."""
    same: dict[tuple[str, int, str], list[tuple[int, Remark]]] = {}
    for rank, entries in sorted(timelines.items()):
        for entry in entries:
            if isinstance(entry, Remark):
                found = entry.finding
                key = (found.code, found.severity, re.sub(r"\d+(?:[.,]\d+)*", "", found.summary))
                same.setdefault(key, []).append((rank, entry))
    merged = [_merged(each) for each in same.values()]
    return sorted(merged, key=lambda each: each.first_step)


def _merged(remarks: Sequence[tuple[int, Remark]]) -> Repeated:
    steps = [remark.step for _, remark in remarks]
    return Repeated(
        finding=max((remark.finding for _, remark in remarks), key=lambda each: each.amount),
        times=len(remarks),
        ranks=tuple(sorted({rank for rank, _ in remarks})),
        first_step=min(steps),
        last_step=max(steps),
    )
