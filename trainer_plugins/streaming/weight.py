"""Keep one frozen weight: in main memory always, on the card sometimes."""

import torch


class StreamedWeight:
    """Keeps a copy of a tensor in main memory, and one storage on the card, empty or full.

    The storage stays the same, so whatever autograd or a custom Function kept of the weight reads
    the right bytes again, as with FSDP (torch/distributed/utils.py, _free_storage). While they are
    away the tensor itself shows NaN: code outside torch would read an empty storage at address 0.
    """

    def __init__(self, shown: torch.Tensor, layer: int, device: torch.device, pins: bool) -> None:
        value = shown.detach()
        self.shown, self.layer = shown, layer  # the number of its layer
        if pins or value.device == device:
            self.host = torch.empty_like(value, device="cpu", pin_memory=pins).copy_(value)
        else:
            self.host = value
        is_there = value.device == device and _is_alone(value)
        self.on_card = value if is_there else torch.empty_like(value, device=device)
        nothing = float("nan") if value.is_floating_point() else 0
        one = torch.full((1,), nothing, dtype=value.dtype, device=device)
        self._away = one.expand(value.shape)
        del value
        self.drop()
        self._num_holders = 0  # without other code's; 0 until it was filled once

    @property
    def num_bytes(self) -> int:
        """Return the size of the weight."""
        return self.host.nbytes

    @property
    def is_held(self) -> bool:
        """Return whether other code has a tensor on the storage, as `weight.data` gives one."""
        return _num_holders(self.on_card) > self._num_holders

    def allocate(self) -> None:
        """Take the memory on the card."""
        self.on_card.untyped_storage().resize_(self.num_bytes)

    def fill(self, non_blocking: bool = False) -> None:
        """Copy the bytes to the card, unseen by autograd: the values are those it knows."""
        self.on_card.data.copy_(self.host, non_blocking=non_blocking)
        self._show(self.on_card)
        self._num_holders = self._num_holders or _num_holders(self.on_card)

    def drop(self) -> None:
        """Free the memory on the card."""
        self._show(self._away)
        self.on_card.untyped_storage().resize_(0)

    def stay(self) -> None:
        """Stay in main memory. The storage on the card is freed with the last tensor on it."""
        self._show(self.host)
        self.on_card = self.host

    def _show(self, value: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # not by way of `guard.py`
            self.shown.data = value

    def write_back(self) -> None:
        """Keep what was written to the weight on the card."""
        self.host.copy_(self.on_card)


def _is_alone(value: torch.Tensor) -> bool:
    """Return whether a tensor fills its storage, and only its parameter shares it."""
    storage = value.untyped_storage()
    return storage.nbytes() == value.nbytes and _num_holders(value) == 2


def _num_holders(tensor: torch.Tensor) -> int:
    """Return how many tensors share a storage."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # `storage` itself
