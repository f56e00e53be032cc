"""Agreement: all ranks make the same decision, or none acts. RollCall finds who takes part."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING
from zlib import crc32

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

logger = logging.getLogger(__name__)


def has_peers() -> bool:
    """Return whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class Agreement:
    """Lets all ranks agree on small numbers, at a point that every rank is sure to reach."""

    # It has its own gloo group: numbers stay on the CPU, and a time-out cannot harm training's
    # group. All ranks ask the same in the same order; the time-out must cover work of a single
    # rank, such as a save.

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout = timedelta(seconds=timeout_seconds)
        self._world: dist.ProcessGroup | None = None
        self._group: dist.ProcessGroup | None = None
        self._broken = False

    def highest(self, value: int) -> int | None:
        """Return the highest value of all ranks; None if they could not agree, now or earlier."""
        highest = self.highest_of([value])
        return None if highest is None else highest[0]

    def highest_of(self, values: Sequence[int]) -> list[int] | None:
        if not has_peers():
            return list(values)
        votes = torch.tensor(values)
        is_agreed = self._meet(lambda group: dist.all_reduce(votes, dist.ReduceOp.MAX, group=group))
        return [int(vote) for vote in votes] if is_agreed else None

    def gather(self, value: torch.Tensor) -> list[torch.Tensor] | None:
        """Return the tensors of all ranks, on the CPU and of one shape; None as `highest` does."""
        if not has_peers():
            return [value]
        # As bytes: gloo lacks some types.
        here = value.contiguous().reshape(-1).view(torch.uint8)
        found = [torch.empty_like(here) for _ in range(dist.get_world_size())]
        if not self._meet(lambda group: dist.all_gather(found, here, group=group)):
            return None
        return [one.view(value.dtype).reshape(value.shape) for one in found]

    def _meet(self, meet: Callable[[dist.ProcessGroup], object]) -> bool:
        """Return whether all ranks took part in this collective and all earlier ones."""
        if self._world is not dist.group.WORLD:
            self._world, self._group, self._broken = dist.group.WORLD, None, False
        if self._broken:
            return False
        try:
            if self._group is None:
                self._group = dist.new_group(
                    backend="gloo", timeout=self.timeout, use_local_synchronization=True
                )
            meet(self._group)
        except RuntimeError as error:  # includes dist.DistError and gloo's time-outs
            self._broken = True
            logger.warning(
                "the ranks could not agree within %.0f s (ddp_timeout): from now on this run"
                " does nothing that needs all ranks, no release and no stop. Look at the log"
                " of the rank that ended or hangs (%s)",
                self.timeout.total_seconds(),
                str(error).splitlines()[0],
            )
            return False
        return True

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_world": None, "_group": None}


@cache
def agreement_within(timeout_seconds: float) -> Agreement:
    """Return this process's agreement with that time-out, which must be equal on all ranks."""
    # With a group per callback, ranks that ask in different orders would wait in two of them.
    return Agreement(timeout_seconds)


def any_rank(answer: bool, timeout_seconds: float, *, if_unknown: bool) -> bool:
    """Return whether any rank answers yes, or `if_unknown` if they cannot agree."""
    highest = agreement_within(timeout_seconds).highest(int(answer))
    return if_unknown if highest is None else bool(highest)


_num_begun: Counter[str] = Counter()


class StepEndVote:
    """Lets the ranks agree on one small number at the end of an optimizer step, without hanging."""

    # Only some ranks may have a callback. So each rank that will ask announces itself in the ranks'
    # store. The first to ask about a step records there whether all are present: then all vote, or
    # none. Evaluations, saves and generations may run on a single rank.

    def __init__(self, question: str, timeout_seconds: float) -> None:
        """Announce that this rank asks from now on; `question` names the callback and interval."""
        self._question = question
        self._timeout_seconds = timeout_seconds
        self._is_asking = self._has_voted = self._has_warned = False
        if has_peers():
            self._is_asking = True
            _num_begun[question] += 1
            self._key = f"trainer_plugins/vote/{question}/{_num_begun[question]}"
            try:
                ranks_store().add(self._key, 1)
            except RuntimeError as error:
                self._stop_asking(str(error).splitlines()[0])

    def highest(self, value: int, step: int) -> int | None:
        """Return the highest value of all ranks; None if not all ask, or they could not agree."""
        if not has_peers():
            return value
        if not self._is_asking or not (self._has_voted or self._do_all_ask(step)):
            return None
        self._has_voted = True
        asked = crc32(f"{self._question} {step}".encode())
        highest = agreement_within(self._timeout_seconds).highest_of([value, asked, -asked])
        if highest is None:
            return None
        if highest[1] != -highest[2]:
            self._stop_asking(
                "the ranks ask different questions at one step, as if their callbacks were in"
                " different orders"
            )
            return None
        return highest[0]

    def leave(self) -> None:
        # Once all have voted this key is unused, and the store may have ended with its rank.
        if self._is_asking and not self._has_voted and has_peers():
            with suppress(RuntimeError):
                ranks_store().add(self._key, -1)
        self._is_asking = False

    def _do_all_ask(self, step: int) -> bool:
        try:
            num_present, num_ranks = int(ranks_store().add(self._key, 0)), dist.get_world_size()
            wish = "vote" if num_present == num_ranks else "wait"
            is_vote = bool(ranks_store().compare_set(f"{self._key}/{step}", "", wish) == b"vote")
        except RuntimeError as error:
            self._stop_asking(str(error).splitlines()[0])
            return False
        if not is_vote and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s is on %d of %d ranks: until the others join, this run does nothing that needs"
                " all of them, no release of the cache and no stop. Give every rank the same"
                " callbacks with the same arguments",
                self._question,
                num_present,
                num_ranks,
            )
        return is_vote

    def _stop_asking(self, why: str) -> None:
        self._is_asking = False
        logger.warning(
            "%s: from now on this run does nothing that needs all ranks, no release of the cache"
            " and no stop (%s). Give every rank the same callbacks in the same order",
            self._question,
            why,
        )


def ranks_store() -> "Store":
    """Return the store through which the ranks found each other; a reference keeps its port."""
    from torch.distributed.distributed_c10d import _get_default_store

    store: Store = _get_default_store()
    return store


_PAUSE_SECONDS = 0.02


class RollCall:
    """Finds in the ranks' store who takes part; no rank waits for one that does not."""

    # An answer ends a turn, and all ranks count turns equally. To take part again, sign again.

    def __init__(self, name: str) -> None:
        self._name = f"trainer_plugins/roll call/{name}"
        self._turn: int | None = None  # the turn this rank signed for; None once it has its answer

    def sign(self) -> None:
        """Announce that this rank takes part, until it gets an answer or calls `leave`."""
        if has_peers():
            with suppress(RuntimeError):  # the others then find it missing
                self._turn = self._current()
                ranks_store().set(self._key(self._turn, dist.get_rank()), "signed")

    def leave(self) -> None:
        """Announce that this rank no longer takes part, unless it has its answer."""
        if self._turn is not None and has_peers():
            with suppress(RuntimeError):  # the store may have ended with its rank
                ranks_store().delete_key(self._key(self._turn, dist.get_rank()))
        self._turn = None

    def missing(self, wait_seconds: float = 60.0) -> str:
        """Report, identically on every rank, who has not signed after a wait; empty if all have."""
        if not has_peers():
            return ""
        try:
            turn = self._current() if self._turn is None else self._turn
            deadline, key = time.monotonic() + wait_seconds, f"{self._name}/{turn}/answer"
            while (absent := self._absent(turn)) and time.monotonic() < deadline:
                if ranks_store().check([key]):
                    break
                time.sleep(_PAUSE_SECONDS)
            # The first rank here decides for all; later signatures belong to the next turn.
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
        ranks = range(dist.get_world_size())
        return [rank for rank in ranks if not ranks_store().check([self._key(turn, rank)])]

    def _key(self, turn: int, rank: int) -> str:
        return f"{self._name}/{turn}/{rank}"
