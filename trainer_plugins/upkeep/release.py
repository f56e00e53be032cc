"""Frees cached memory on every rank at the same step or on none, and only when it pays off."""

import logging
from collections import deque
from dataclasses import dataclass, field
from time import perf_counter

from trainer_plugins.devices import Device
from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.timeline import Flush, Timeline
from trainer_plugins.units import size
from trainer_plugins.upkeep.agreement import StepEndVote
from trainer_plugins.watch.foreign import tolerance_bytes

logger = logging.getLogger(__name__)

RECENT_STEPS = 50  # growth outside torch counts this long: another process's, or NCCL's at first
_NO, _YES, _HOLD = 0, 1, 2  # a rank's vote; the highest one wins


@dataclass(eq=False)
class AgreedRelease:
    """Frees one device's cache when any rank has enough to gain and no rank objects."""

    # The cache reserves memory for this run. If memory outside torch grew within the last 50 steps,
    # another process is taking free memory: this rank then objects, and all keep their caches.

    device: Device
    timeline: Timeline
    vote: StepEndVote
    min_reclaimable_fraction: float = 0.10
    # Steps and bytes outside torch, in order.
    _noticed: deque[tuple[int, int]] = field(default_factory=deque, init=False)

    def consider(self, step: int, reason: str, *, is_due: bool = True) -> Flush | None:
        """Ask all ranks, and free the cache if they agree. Collective, at the end of a step."""
        wish = _HOLD
        try:
            wish = self._wish(step, is_due)
        finally:  # a failed reading must not make the other ranks wait
            agreed = self.vote.highest(wish, step)
        if agreed != _YES:
            return None
        start = perf_counter()
        released_bytes = self.device.release_cached()
        flush = Flush(
            step=step,
            reason=reason,
            released_bytes=released_bytes,
            seconds=perf_counter() - start,
            stuck_bytes=self.device.read().cached_bytes,
        )
        self.timeline.add(flush)
        return flush

    def notice(self, step: int) -> MemoryReading:
        reading = self.device.read()
        while len(self._noticed) > 1 and self._noticed[0][0] < step - RECENT_STEPS:
            self._noticed.popleft()
        self._noticed.append((step, reading.non_torch_bytes))
        return reading

    def _wish(self, step: int, is_due: bool) -> int:
        reading = self.notice(step)
        grown_bytes = reading.non_torch_bytes - min(num_bytes for _, num_bytes in self._noticed)
        # We do not reserve main memory: there is nothing to hold.
        if self.device.name != "cpu" and grown_bytes >= tolerance_bytes(reading.total_bytes):
            logger.info(
                "step %d: holding the cache, memory outside torch grew by %s",
                step,
                size(grown_bytes),
            )
            return _HOLD
        is_enough = reading.cached_bytes >= self.min_reclaimable_fraction * reading.total_bytes
        return _YES if is_due and is_enough else _NO
