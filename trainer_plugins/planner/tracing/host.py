"""Count the tensors of a run in a node's main memory. Imports torch."""

import weakref

import torch

from trainer_plugins.planner.plan import Moment


class HostMemory:
    """Counts the storages on the host, and those of them that are pinned. Sizes in bytes."""

    def __init__(self) -> None:
        self.ranks = 1
        """How many processes of a node do the same on the host as this one."""

        self.peaks: dict[Moment, int] = {}
        """By moment, the peak of all storages."""

        self.pinned_peak_bytes = 0
        self._now = 0
        self._pinned_now = 0
        self._pinned: set[int] = set()
        self._bytes: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._truths: dict[int, str] = {}

    def see(self, storage: torch.UntypedStorage, moment: Moment) -> None:
        """Count a storage, unless it was counted before."""
        key = key_of(storage)
        if key in self._bytes:
            return

        def died(_: object) -> None:
            num_bytes = self._bytes.pop(key)[1]
            self._truths.pop(key, None)
            self._now -= num_bytes
            if key in self._pinned:
                self._pinned.remove(key)
                self._pinned_now -= num_bytes

        num_bytes = storage.nbytes() * self.ranks
        self._bytes[key] = (weakref.ref(storage, died), num_bytes)
        self._add(num_bytes, moment)

    def pin(self, tensor: torch.Tensor, moment: Moment) -> None:
        """Count a tensor as pinned: it takes a power of two of bytes.

        ATen/core/CachingHostAllocator.h.
        """
        key = key_of(tensor.untyped_storage())
        if key in self._pinned or key not in self._bytes:
            return
        reference, before = self._bytes[key]
        after = (1 << max(0, tensor.untyped_storage().nbytes() - 1).bit_length()) * self.ranks
        self._bytes[key] = (reference, after)
        self._pinned.add(key)
        self._pinned_now += after
        self._add(after - before, moment)
        self.pinned_peak_bytes = max(self.pinned_peak_bytes, self._pinned_now)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether `pin` was called for the storage of this tensor."""
        return key_of(tensor.untyped_storage()) in self._pinned

    def note_truth(self, storage: torch.UntypedStorage, operation: str) -> None:
        """Note which operation made a storage that holds one bool."""
        self._truths[key_of(storage)] = operation

    def truth_of(self, storage: torch.UntypedStorage) -> str:
        """Return the operation that made a storage that holds one bool; empty for any other."""
        return self._truths.get(key_of(storage), "")

    def _add(self, num_bytes: int, moment: Moment) -> None:
        self._now += num_bytes
        self.peaks[moment] = max(self.peaks.get(moment, 0), self._now)


def key_of(storage: torch.UntypedStorage) -> int:
    """Return the address of the C++ object behind a storage, which identifies it while it lives."""
    return int(storage._cdata)
