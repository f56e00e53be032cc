"""Count the tensors of a run in a node's main memory. Imports torch."""

import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainer_plugins.allocator.pinned import block_bytes
from trainer_plugins.planner.plan import Moment
from trainer_plugins.planner.tracing.kernels import Operator, OperatorArgs, OperatorKwargs

aten = torch.ops.aten


class HostMemory:
    """Counts the storages on the host; a pinned block is kept for the next of its size."""

    def __init__(self) -> None:
        self.ranks = 1  # how many processes of a node do the same on the host as this one
        self.peaks: dict[Moment, int] = {}
        self.pinned_bytes = 0  # the blocks of pinned memory of all ranks, which only grow
        self._now = 0
        self._pinned: dict[int, tuple[int, int]] = {}
        self._free: dict[tuple[int, int], int] = defaultdict(int)
        self._bytes: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._truths: dict[int, str] = {}

    @contextmanager
    def in_ranks(self, num_ranks: int) -> Iterator[None]:
        """Count what is made inside the block for this number of processes of the node."""
        before, self.ranks = self.ranks, num_ranks
        try:
            yield
        finally:
            self.ranks = before

    def see(self, storage: torch.UntypedStorage, moment: Moment) -> None:
        """Count a storage, unless it was counted before."""
        if key_of(storage) not in self._bytes:
            num_bytes = storage.nbytes() * self.ranks
            self._remember(storage, num_bytes)
            self._add(num_bytes, moment)

    def pin(self, storage: torch.UntypedStorage, moment: Moment) -> None:
        """Count a new storage as pinned, in a block that is free or new."""
        key = key_of(storage)
        if key in self._bytes:
            return
        self._remember(storage, 0)
        block = self._pinned[key] = block_bytes(storage.nbytes()), self.ranks
        if self._free[block]:
            self._free[block] -= 1
            return
        new_bytes = block[0] * self.ranks
        self.pinned_bytes += new_bytes
        self._add(new_bytes, moment)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether `pin` was called for the storage of this tensor."""
        return key_of(tensor.untyped_storage()) in self._pinned

    def note_truth(self, storage: torch.UntypedStorage, operation: str) -> None:
        """Note which operation made a storage that holds one bool."""
        self._truths[key_of(storage)] = operation

    def truth_of(self, storage: torch.UntypedStorage) -> str:
        """Return the operation that made a storage that holds one bool; empty for any other."""
        return self._truths.get(key_of(storage), "")

    def _remember(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        key = key_of(storage)

        def died(_: object) -> None:
            self._now -= self._bytes.pop(key)[1]
            self._truths.pop(key, None)
            block = self._pinned.pop(key, None)
            if block is not None:
                self._free[block] += 1

        self._bytes[key] = (weakref.ref(storage, died), num_bytes)

    def _add(self, num_bytes: int, moment: Moment) -> None:
        self._now += num_bytes
        self.peaks[moment] = max(self.peaks.get(moment, 0), self._now)


def makes_pinned(func: Operator, args: OperatorArgs, kwargs: OperatorKwargs) -> bool:
    """Return whether a result is pinned: on request, or copied to the host meanwhile (_to_copy)."""
    if func is aten._pin_memory.default or kwargs.get("pin_memory"):
        return True
    if func is not aten._to_copy.default or not kwargs.get("non_blocking"):
        return False
    return (
        args[0].device.type != "cpu"
        and torch.device(kwargs.get("device") or args[0].device).type == "cpu"
    )


def key_of(storage: torch.UntypedStorage) -> int:
    """Return the address of the C++ object behind a storage, which identifies it while it lives."""
    return int(storage._cdata)
