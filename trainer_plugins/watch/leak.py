"""Finds leaks: memory that rises from step to step, of which kind, and how many steps are left."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median

from trainer_plugins.finding import Finding, Severity
from trainer_plugins.reading import MemoryReading
from trainer_plugins.units import size

WINDOW = 32
"""The number of steps that are judged together."""

WARM_UP_LOOKS = 8
"""Looks before growth counts: first steps add optimizer states, cuBLAS workspaces, NCCL buffers."""

_BLOCK = 4
_RISING_FRACTION = 0.001


@dataclass(frozen=True, slots=True)
class Footprint:
    """Holds what is live after a step, when activations are gone; sizes in bytes."""

    step: int
    tensors: int
    cache: int
    non_torch: int
    host: int


@dataclass(frozen=True, slots=True)
class Growth:
    """Tells how fast one kind of memory rises, and how many steps it can go on."""

    kind: str
    """The field of `Footprint` that rises."""

    bytes_a_step: float
    risen_bytes: int
    steps_left: int

    @property
    def ends_the_run(self) -> bool:
        """Return whether the run is out of memory then."""
        return self.kind not in _END


_KINDS = {
    "tensors": (
        "live tensors",
        "Look for what is kept from step to step: losses or logits appended without .item() or "
        ".detach().cpu(), outputs in a list, hooks that store activations.",
    ),
    "cache": (
        "reserved but unused memory",
        "Lengths that never repeat fragment the cache: set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, alone, or pad to a few lengths "
        "(pad_to_multiple_of=64).",
    ),
    "non_torch": (
        "memory outside torch",
        "A library takes it (NCCL communicators, CUDA graphs, a second context): look for what is "
        "created in every step.",
    ),
    "host": (
        "main memory of this process",
        "Look at the dataset and its workers: lists that grow, caches, a copy of Python objects in "
        "each worker.",
    ),
}

_CACHE_OF_EXPANDABLE = (
    "Lengths that never repeat fragment the cache: pad to a few lengths (pad_to_multiple_of=64). "
    "expandable_segments is set already."
)

# A full cache does not end the run: the allocator retries, which waits for the card.
_END = {"cache": "the allocator has to flush it and ask again"}


def leaks(
    window: Sequence[Footprint],
    card: MemoryReading,
    host: MemoryReading,
    *,
    is_expandable: bool = False,
) -> list[Finding]:
    """Report what `growths` finds, with a remedy for each kind.

    Args:
        window: footprints as `growths` takes them.
        card: the last reading of the card.
        host: the same for main memory.
        is_expandable: whether torch was told to use expandable segments.
    """
    findings = []
    for growth in growths(window, card, host):
        kind, left = growth.kind, growth.steps_left
        what, remedy = _KINDS[kind]
        findings.append(
            Finding(
                code=f"leak-{kind.replace('_', '-')}",
                severity=Severity.ERROR
                if left <= WINDOW and growth.ends_the_run
                else Severity.WARNING,
                summary=f"{what} rises step by step:"
                f" {_END.get(kind, 'out of memory')} in about {left} steps",
                evidence=(
                    f"{size(growth.bytes_a_step)} a step, {size(growth.risen_bytes)} from step"
                    f" {window[0].step} to {window[-1].step}"
                ),
                remedy=_CACHE_OF_EXPANDABLE if kind == "cache" and is_expandable else remedy,
                amount=float(growth.risen_bytes),
            )
        )
    return findings


def growths(window: Sequence[Footprint], card: MemoryReading, host: MemoryReading) -> list[Growth]:
    """Judge footprints of consecutive steps, oldest first, taken at the same moment of each step.

    The slope is Theil and Sen's (the median of the slopes between all pairs) over the minima of
    blocks of 4 steps, so a few long batches, a save or an evaluation in between do not move it. A
    leak rises in every block but one.

    Args:
        window: at least `WINDOW` footprints; fewer show no growth.
        card: the last reading of the card: what its peak left free, and what is noise at its size.
        host: the same for main memory.
    """
    if len(window) < WINDOW:
        return []
    footprints = list(window)  # a deque does not slice
    blocks = [footprints[i : i + _BLOCK] for i in range(0, len(footprints) - _BLOCK + 1, _BLOCK)]
    found = []
    for kind in _KINDS:
        total_bytes, left_bytes = (
            (host.total_bytes, host.free_bytes)
            if kind == "host"
            else (card.total_bytes, card.headroom_bytes)
        )
        lows = [min(getattr(footprint, kind) for footprint in block) for block in blocks]
        risen_bytes = lows[-1] - lows[0]
        # First the test that a healthy run fails at once: the slope costs more than the rest.
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
    return found
