"""Pace: decides between steps whether the limit may grow, or has to shrink before a failure."""

import math
from dataclasses import dataclass

PATIENCE_STEPS = 50
"""Steps without a failure before more is tried; it doubles each time that more did not fit."""

_WORTH = 1.1
"""Least growth of a limit that is worth a failed attempt."""

_NUM_THRASHING = 2
"""Steps in a row in which the allocator emptied its cache and tried again.

Composer counts them so too (its trainer.py).
"""


@dataclass(slots=True)
class Pace:
    """Changes the limit of one run, in cells (`limit.py`).

    A limit that was halved is too low by up to a half: it is bisected.
    """

    fits: float = 0.0
    """The limit before it grew; 0 if it never did."""
    too_much: float = math.inf
    """The least that did not fit.

    It is forgotten when the limit has come near it. Each attempt that fails because of that doubles
    the patience, so in n steps there are at most log2(n / 50) of them.
    """
    patience_steps: int = PATIENCE_STEPS

    num_clean: int = 0
    has_failed: bool = False
    is_divided: bool = False
    largest: int = 0
    """The most that was computed at once in this step."""
    num_retries: int = 0
    num_thrashing: int = 0
    ceiling: float = math.inf
    """The limit that a rehearsal found: more is never tried."""

    def failed(self, num_cells: int, lowered: float) -> float:
        """Note what did not fit.

        Args:
            num_cells: what did not fit.
            lowered: the limit that halves it.

        Returns:
            The limit: what fitted before, if that is known, or else `lowered`.
        """
        self.has_failed, self.num_clean = True, 0
        self.too_much = min(self.too_much, num_cells)
        if not 0 < self.fits < num_cells:
            return lowered
        limit, self.fits = self.fits, 0.0
        self.patience_steps *= 2
        return limit

    def computed(self, num_cells: int, is_divided: bool) -> None:
        """Note what was computed at once."""
        self.largest = max(self.largest, num_cells)
        self.is_divided |= is_divided

    def after_step(self, limit: float, num_retries: int) -> tuple[float, bool]:
        """Decide on the limit from now on.

        Args:
            limit: the limit of the step that has ended.
            num_retries: how often the allocator has emptied its cache and tried again since the
                process began.

        Returns:
            The limit, and whether it was lowered because of the allocator.
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
            self.too_much = self.ceiling  # another process's memory may be free by now
            return limit, False
        self.fits = limit
        return more, False
