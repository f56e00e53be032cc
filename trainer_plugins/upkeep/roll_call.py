"""RollCall: finds out whether all ranks take part in something, before the first waits for all."""

import time
from contextlib import suppress

import torch.distributed as dist

from trainer_plugins.upkeep.agreement import has_peers, ranks_store

_PAUSE_SECONDS = 0.02


class RollCall:
    """Asks in the ranks' store who takes part; no rank waits for one that does not."""

    # An answer ends a turn, which all ranks count alike; to take part again, a rank signs again.

    def __init__(self, name: str) -> None:
        self._name = f"trainer_plugins/roll call/{name}"
        self._turn: int | None = None  # what this rank has signed for; None once it has its answer

    def sign(self) -> None:
        """Announce that this rank takes part, until it gets an answer or calls `leave`."""
        if has_peers():
            with suppress(RuntimeError):  # the others then find it missing
                self._turn = self._current()
                self._put(1)

    def leave(self) -> None:
        """Announce that this rank no longer takes part, unless it has its answer."""
        if self._turn is not None and has_peers():
            with suppress(RuntimeError):  # the store may have ended with its rank
                self._put(0)
        self._turn = None

    def missing(self, wait_seconds: float = 60.0) -> str:
        """Say, the same on every rank, who has not signed after a wait; empty if all have."""
        if not has_peers():
            return ""
        try:
            turn = self._current() if self._turn is None else self._turn
            deadline, key = time.monotonic() + wait_seconds, f"{self._name}/{turn}/answer"
            while (absent := self._absent(turn)) and time.monotonic() < deadline:
                if ranks_store().check([key]):
                    break
                time.sleep(_PAUSE_SECONDS)
            # The first rank that gets here decides for all, so that none goes on alone. A rank that
            # signs later belongs to the next turn.
            answer = ranks_store().compare_set(key, "", "some" if absent else "all")
            ranks_store().compare_set(f"{self._name}/turn", str(turn), str(turn + 1))
        except RuntimeError as error:
            return f"the ranks could not be counted ({str(error).splitlines()[0]})"
        self._turn = None
        if answer == b"all":
            return ""
        who = ", ".join(map(str, absent)) or "one that came late"
        return f"of {dist.get_world_size()} ranks these do not take part: {who}"

    def _current(self) -> int:
        return ranks_store().add(f"{self._name}/turn", 0)

    def _absent(self, turn: int) -> list[int]:
        return [rank for rank in range(dist.get_world_size()) if self._signed(turn, rank) < 1]

    def _signed(self, turn: int, rank: int, more: int = 0) -> int:
        return ranks_store().add(f"{self._name}/{turn}/{rank}", more)

    def _put(self, signed: int) -> None:
        assert self._turn is not None
        rank = dist.get_rank()
        self._signed(self._turn, rank, signed - self._signed(self._turn, rank))
