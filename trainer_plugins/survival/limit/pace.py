"""Pace: between steps, whether the limit may grow again, or has to shrink before something fails."""

import math
from dataclasses import dataclass

PATIENCE_STEPS = 50
"""Steps without a failure before more is tried.

Twice as many after each time that it did not fit.
"""

_WORTH = 1.1
"""Less than a tenth more is not worth a failed attempt."""

_NUM_THRASHING = 2
"""Steps in a row in which the allocator emptied its cache and tried again, as Composer counts them (its trainer.py)."""


@dataclass(slots=True)
class Pace:
    """Of one run, in cells (`limit.py`).

    A limit that was halved is too low by up to a half: it is bisected.
    """

    fits: float = 0.0
    """A limit before it grew; 0 where it never did."""
    too_much: float = math.inf
    """The least that did not fit. Forgotten where the limit has come near it: each attempt that
    fails because of that doubles the patience, so in n steps there are no more of them than log2(n
    / 50)."""
    patience_steps: int = PATIENCE_STEPS

    num_clean: int = 0
    has_failed: bool = False
    is_divided: bool = False
    largest: int = 0
    """What was computed at once, at most, in this step."""
    num_retries: int = 0
    num_thrashing: int = 0
    ceiling: float = math.inf
    """What a rehearsal found: more is never tried."""

    def failed(self, num_cells: int, lowered: float) -> float:
        """So much did not fit, and half of it is to be tried.

        Returns the limit: what fitted before, if it is known.
        """
        self.has_failed, self.num_clean = True, 0
        self.too_much = min(self.too_much, num_cells)
        if not 0 < self.fits < num_cells:
            return lowered
        limit, self.fits = self.fits, 0.0
        self.patience_steps *= 2
        return limit

    def computed(self, num_cells: int, is_divided: bool) -> None:
        """So much was computed at once."""
        self.largest = max(self.largest, num_cells)
        self.is_divided |= is_divided

    def after_step(self, limit: float, num_retries: int) -> tuple[float, bool]:
        """The limit from now on, and whether that is because of the allocator.

        Args:
            limit: that of the step.
            num_retries: how often the allocator has emptied its cache and tried again since the
                process began.
        """
        retried, self.num_retries = num_retries > self.num_retries, num_retries
        self.num_thrashing = self.num_thrashing + 1 if retried and not self.has_failed else 0
        largest, is_clean = self.largest, self.is_divided and not self.has_failed
        self.has_failed, self.is_divided, self.largest = False, False, 0
        if self.num_thrashing == _NUM_THRASHING and largest:
            self.num_thrashing = self.num_clean = 0
            self.too_much = min(self.too_much, largest)
            return min(limit, largest / 2), True
        self.num_clean += is_clean
        if self.num_clean < self.patience_steps or math.isinf(limit):
            return limit, False
        self.num_clean = 0
        more = 2 * limit if math.isinf(self.too_much) else (limit + self.too_much) / 2
        if more < _WORTH * limit:
            self.too_much = self.ceiling  # it was, then: a neighbour's memory may be free by now
            return limit, False
        self.fits = limit
        return more, False
