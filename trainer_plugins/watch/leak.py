"""Finds leaks: which kind of memory rises from step to step, and how many steps remain."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from statistics import median
from typing import NamedTuple, Protocol

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.reading import MemoryReading
from trainer_plugins.units import size
from trainer_plugins.watch.fragmentation import against_fragmentation

WINDOW = 32  # number of steps judged together

# Looks before growth counts: first steps add optimizer states, cuBLAS workspaces, NCCL buffers.
WARM_UP_LOOKS = 8

# Looks between detecting growth and naming it, because a step's own tensors come and go.
LOOKS_TO_NAME = 2

RISES_AT_MOMENTS = 2 + LOOKS_TO_NAME  # two rises establish growth, the rest identify its tensors

_BLOCK = 4
_RISING_FRACTION = 0.001


class Footprint(NamedTuple):
    """Memory that is live after a step, once activations are freed; sizes in bytes."""

    step: int
    tensors: int
    cache: int
    non_torch: int
    host: int
    workers: int = 0

    @classmethod
    def take(cls, step: int, reading: MemoryReading, host: int) -> "Footprint":
        """Take the card's memory from a reading; a reading of the CPU counts as `host` only."""
        is_card = reading.device != "cpu"
        tensors = reading.allocated_bytes if is_card else 0
        non_torch = reading.non_torch_bytes if is_card else 0
        return cls(step, tensors, reading.cached_bytes, non_torch, host)


@dataclass(frozen=True, slots=True)
class Growth:
    """The rate at which one kind of memory rises, and the number of steps until it is full."""

    kind: str  # the field of `Footprint` that rises
    bytes_a_step: float
    risen_bytes: int
    steps_left: int

    @property
    def ends_the_run(self) -> bool:
        """Return whether growth ends in an OOM; a full cache only makes the allocator flush it."""
        return self.kind != "cache"


KINDS = {
    "tensors": (
        "live tensors grow",
        f"Keep numbers ({advice.KEEP_NUMBERS.flag(Door.CODE)}). Look for tensors kept from"
        " step to step: losses or outputs appended to a list, hooks that store activations.",
    ),
    "cache": ("reserved but unused memory grows", ""),
    "non_torch": (
        "memory outside torch grows",
        "A library takes it (NCCL communicators, CUDA graphs, a second context): look for"
        " objects created in every step.",
    ),
    "host": (
        "main memory of this process grows",
        "Look at the dataset and the callbacks: growing lists, caches.",
    ),
    "workers": (
        "main memory of the dataloader workers grows",
        "Look at the dataset: caches that each worker fills, Python objects that each worker"
        " copies.",
    ),
}  # by the field of `Footprint`: a description of the rise, and the remedy


class Teller(Protocol):
    """Identifies the tensors that grow and the objects that hold them."""

    def begin(self) -> None:
        """Remember the live tensors."""

    def look(self) -> None:
        """Look at a step's batch between `begin` and `tell`."""

    def tell(self, finding: Finding, step: int, unit: str = "step") -> Finding:
        """Add the growth since `begin` to the finding of a leak."""


class AtMoments:
    """Finds live tensors that rise with each save or evaluation but not in the steps between."""

    def __init__(self) -> None:
        self._lows: dict[str, list[int]] = {}  # before each such moment, the lowest of the steps
        self._low_bytes: dict[str, int] = {}
        self._last_bytes = 0

    def step(self, allocated_bytes: int) -> None:
        self._last_bytes = allocated_bytes
        for moment, low_bytes in self._low_bytes.items():
            self._low_bytes[moment] = min(low_bytes, allocated_bytes)

    def rises(self, moment: str, total_bytes: int) -> list[int]:
        """Start a new interval at this moment; return the rises so far if all are significant."""
        low_bytes, self._low_bytes[moment] = self._low_bytes.get(moment), total_bytes
        lows = self._lows.setdefault(moment, [])
        if low_bytes is None or low_bytes == total_bytes:
            return []  # the first of its kind, or no step since the last
        lows.append(low_bytes)
        rises = [after - before for before, after in pairwise(lows[-RISES_AT_MOMENTS - 1 :])]
        least_bytes = max(_RISING_FRACTION * total_bytes, 2 * (self._last_bytes - low_bytes))
        return rises if all(rise > least_bytes for rise in rises) else []


def leak_at(moment: str, rises: Sequence[int], reading: MemoryReading, step: int) -> Finding:
    """Report a leak that grows with each save or evaluation."""
    what, remedy = KINDS["tensors"]
    each_bytes = int(median(rises))
    num_left = reading.headroom_bytes // each_bytes
    return Finding.warning(
        code="leak-tensors",
        summary=f"{what} with each {moment}: out of memory after about {num_left} more",
        evidence=f"{size(each_bytes)} with each {moment}, {len(rises)} times until step {step}",
        remedy=remedy,
        amount=1 / (1 + num_left),  # how near the end is
        data={f"bytes_a_{moment}": each_bytes, "num_rises": len(rises), "step": step},
    )


def leaks(
    window: Sequence[Footprint],
    card: MemoryReading,
    host: MemoryReading,
    *,
    is_expandable: bool = False,
) -> Iterator[Finding]:
    """Report the results of `growths`, with a remedy for each kind of memory."""
    for growth in growths(window, card, host):
        what, remedy = KINDS[growth.kind]
        end, why, is_urgent = "out of memory", "", growth.steps_left <= WINDOW
        if not growth.ends_the_run:
            end, is_urgent = "the allocator has to flush it and retry", False
            why = "; lengths that never repeat fragment it"
            remedy = against_fragmentation(is_expandable)
        yield Finding(
            code=f"leak-{growth.kind.replace('_', '-')}",
            severity=Severity.ERROR if is_urgent else Severity.WARNING,
            summary=f"{what} in each step: {end} in about {growth.steps_left} steps",
            evidence=f"{size(growth.bytes_a_step)} per step, {size(growth.risen_bytes)} from step"
            f" {window[0].step} to {window[-1].step}{why}",
            remedy=remedy,
            amount=1 / (1 + growth.steps_left),  # how near the end is
            data={
                "bytes_a_step": growth.bytes_a_step,
                "risen_bytes": growth.risen_bytes,
                "first_step": window[0].step,
                "last_step": window[-1].step,
                "steps_left": growth.steps_left,
            },
        )


def _count_gaps(rising: list[Growth], card: MemoryReading) -> list[Growth]:
    """Merge a cache that rises less than live tensors into theirs: it is the gaps between leaks."""
    rates = {each.kind: each.bytes_a_step for each in rising}
    tensors, gaps = rates.get("tensors", 0.0), rates.get("cache", 0.0)
    if not 0 < gaps < tensors:
        return rising
    most_bytes = max(0, card.reserved_bytes - card.peak_allocated_bytes)
    left_bytes = card.headroom_bytes - min(most_bytes, card.allocated_bytes * gaps / tensors)
    steps_left = max(0, int(left_bytes / (tensors + gaps)))
    return [
        replace(each, steps_left=steps_left) if each.kind == "tensors" else each
        for each in rising
        if each.kind != "cache"
    ]


def is_leak_news(leak: Finding, before: Finding | None) -> bool:
    """Return whether to report a leak again: its severity rose, or the steps left have halved."""
    if before is None or leak.severity > before.severity:
        return True
    is_of_steps = "bytes_a_step" in leak.data  # rather than of saves or evaluations
    if is_of_steps != ("bytes_a_step" in before.data):
        return is_of_steps
    return leak.amount >= 2 * before.amount


def growths(window: Sequence[Footprint], card: MemoryReading, host: MemoryReading) -> list[Growth]:
    """Judge footprints of consecutive steps, oldest first; fewer than `WINDOW` show no growth."""
    # We take the Theil-Sen slope (the median over all pairs) of the minima of blocks of 4 steps, so
    # that long batches, saves and evaluations do not move it. A leak rises in all blocks but one.
    if len(window) < WINDOW:
        return []
    footprints = list(window)  # deques do not slice
    blocks = [footprints[i : i + _BLOCK] for i in range(0, len(footprints) - _BLOCK + 1, _BLOCK)]
    found = []
    for kind in KINDS:
        total_bytes, left_bytes = card.total_bytes, card.headroom_bytes
        if kind in ("host", "workers"):
            total_bytes, left_bytes = host.total_bytes, host.free_bytes
        lows = [min(getattr(footprint, kind) for footprint in block) for block in blocks]
        risen_bytes = lows[-1] - lows[0]
        # Cheap tests first: healthy runs fail them.
        if risen_bytes < _RISING_FRACTION * total_bytes:
            continue
        if sum(after > before for before, after in pairwise(lows)) < len(lows) - 2:
            continue
        points = [(block[0].step, low) for block, low in zip(blocks, lows, strict=True)]
        slope = median(
            (y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2) if x2 > x1
        )
        if slope > 0:
            found.append(Growth(kind, slope, risen_bytes, max(0, int(left_bytes / slope))))
    return _count_gaps(found, card)
