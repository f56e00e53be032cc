"""Release: give cached memory back to the card, on every rank at the same step or on none, and only when it pays."""

from collections import deque
from time import perf_counter

from trainer_plugins.agreement import Agreement
from trainer_plugins.devices import Device
from trainer_plugins.timeline import Flush, Timeline
from trainer_plugins.watch.foreign import tolerance_bytes

RECENT_QUESTIONS = 5
"""How far back growth outside torch counts: a neighbour's, and also NCCL's own, which comes once, after the start."""

_NO, _YES, _HOLD = 0, 1, 2  # what a rank votes; the highest vote counts


class AgreedRelease:
    """Releases the cache of one device when any rank has enough to gain, and no rank has a reason to hold.

    A cache is this run's reservation of memory. While memory outside torch grows, over the last few questions,
    somebody else is taking what is free: then a rank holds its cache, and so do all. A question costs a reading and a
    vote of the ranks; a release makes the driver wait for the card, and the memory has to be fetched again.
    """

    def __init__(
        self,
        device: Device,
        timeline: Timeline,
        min_reclaimable_fraction: float = 0.10,
        agreement: Agreement | None = None,
    ) -> None:
        """Set the conditions of a release.

        Args:
            device: whose cache to release.
            timeline: where each release is recorded with its gain and its cost.
            min_reclaimable_fraction: share of the card that some rank must have cached; 0 releases whenever asked.
            agreement: how the ranks vote.

        Raises:
            ValueError: the fraction is not between 0 and 1.
        """
        if not 0 <= min_reclaimable_fraction <= 1:
            raise ValueError(f"min_reclaimable_fraction is a share of the card, 0 to 1, got {min_reclaimable_fraction}")
        self.device = device
        self.timeline = timeline
        self.min_reclaimable_fraction = min_reclaimable_fraction
        self.agreement = agreement or Agreement()
        self._non_torch_bytes = deque([device.read().non_torch_bytes], maxlen=RECENT_QUESTIONS)

    def consider(self, step: int, reason: str) -> Flush | None:
        """Ask all ranks, and release if they agree. Every rank has to call this at the same step."""
        if self.agreement.highest(self._vote()) != _YES:
            return None
        start = perf_counter()
        released_bytes = self.device.release_cached()
        seconds = perf_counter() - start
        after = self.device.read()
        flush = Flush(
            step=step,
            reason=reason,
            released_bytes=released_bytes,
            stuck_bytes=after.cached_bytes,
            seconds=seconds,
        )
        self.timeline.add(flush)
        return flush

    def _vote(self) -> int:
        reading = self.device.read()
        grown_bytes = reading.non_torch_bytes - min(self._non_torch_bytes)
        self._non_torch_bytes.append(reading.non_torch_bytes)
        if grown_bytes >= tolerance_bytes(reading.total_bytes):
            return _HOLD
        return _YES if reading.cached_bytes >= self.min_reclaimable_fraction * reading.total_bytes else _NO
