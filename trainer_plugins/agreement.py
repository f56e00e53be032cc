"""Agreement: every rank of a run decides the same, or none acts."""

import logging
from datetime import timedelta

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)


class Agreement:
    """Lets the ranks of a run agree on one small number.

    It uses a gloo group of its own, made at the first question: the numbers stay on the CPU, no card is waited for,
    and a time-out cannot harm the group that training uses. A question costs about 0.2 ms between two ranks of one
    machine, nothing with one rank. Every rank has to ask the same questions in the same order, within a time that
    leaves room for what one rank does alone, such as a save.
    """

    def __init__(self, timeout_seconds: float = 600.0) -> None:
        if timeout_seconds <= 0:
            raise ValueError(f"ranks need a positive time to answer, got timeout_seconds={timeout_seconds}")
        self.timeout = timedelta(seconds=timeout_seconds)
        self._world: dist.ProcessGroup | None = None
        self._group: dist.ProcessGroup | None = None
        self._broken = False

    def highest(self, value: int) -> int | None:
        """The highest value that any rank brings; None when the ranks could not agree in time, now and ever after."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return value
        if self._world is not dist.group.WORLD:
            self._world, self._group, self._broken = dist.group.WORLD, None, False
        if self._broken:
            return None
        try:
            if self._group is None:
                self._group = dist.new_group(backend="gloo", timeout=self.timeout, use_local_synchronization=True)
            votes = torch.tensor([value])
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:  # dist.DistError and gloo's own time-outs are RuntimeErrors
            self._broken = True
            logger.warning(
                "the ranks could not agree within %.0f s, so nothing that needs all of them is done from here on: "
                "no release, no stop. Give every rank the same callbacks (%s)",
                self.timeout.total_seconds(),
                str(error).splitlines()[0],
            )
            return None
        return int(votes.item())
