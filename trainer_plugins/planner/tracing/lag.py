"""Know what a card has done, if it lags behind the program as far as the program lets it.

A program runs ahead of its card. It waits for the card only where it synchronises, and until then
nothing is known to be done. So a plan counts the most memory that blocks can hold because another
stream may still read them. The streams of a card are assumed to keep up with each other: what the
program asked for earlier is done earlier.
"""

from collections import deque
from collections.abc import Callable


class Lag:
    """Keeps what is still to be done before memory is free."""

    def __init__(self) -> None:
        self._now = 0
        self._waiting: deque[tuple[int, Callable[[], object]]] = deque()

    def mark(self) -> int:
        """Return this place in the program, for `finish`."""
        self._now += 1
        return self._now

    def finish(self, mark: int) -> None:
        """Let the program wait until the card has come to a place."""
        while self._waiting and self._waiting[0][0] <= mark:
            self._waiting.popleft()[1]()

    def later(self, then: Callable[[], object]) -> None:
        """Call a function when the card has surely come to this place."""
        self._waiting.append((self.mark(), then))
