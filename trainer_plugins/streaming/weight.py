"""Keeps one frozen weight: always in main memory, sometimes on the card."""

import torch


class StreamedWeight:
    """Keeps a copy of a tensor in main memory, and one storage on the card, empty or full.

    The storage stays the same, so anything that autograd or a custom Function saved of the weight
    reads the right bytes again, as with FSDP (torch/distributed/utils.py, _free_storage). While the
    bytes are absent the tensor shows NaN: code outside torch would read address 0.
    """

    def __init__(self, shown: torch.Tensor, layer: int, device: torch.device, pins: bool) -> None:
        value = shown.detach()
        self.shown, self.layer = shown, layer  # its layer's number
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
        self._num_holders = 0  # holders other than foreign code; 0 until first filled

    @property
    def num_bytes(self) -> int:
        return self.host.nbytes

    @property
    def is_held(self) -> bool:
        """Return whether other code holds a tensor on the storage, such as `weight.data`."""
        return _num_holders(self.on_card) > self._num_holders

    def allocate(self) -> None:
        self.on_card.untyped_storage().resize_(self.num_bytes)

    def fill(self, non_blocking: bool = False) -> None:
        """Copy the bytes to the card, hidden from autograd: the values are those it knows."""
        self.on_card.data.copy_(self.host, non_blocking=non_blocking)
        self._show(self.on_card)
        self._num_holders = self._num_holders or _num_holders(self.on_card)

    def drop(self) -> None:
        self._show(self._away)
        self.on_card.untyped_storage().resize_(0)

    def stay(self) -> None:
        """Stay in main memory. The storage on the card is freed with the last tensor on it."""
        self._show(self.host)
        self.on_card = self.host

    def _show(self, value: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # bypasses `guard.py`
            self.shown.data = value

    def write_back(self) -> None:
        """Copy changes made on the card back to main memory."""
        self.host.copy_(self.on_card)


def _is_alone(value: torch.Tensor) -> bool:
    """Return whether a tensor fills its storage and only its parameter shares it."""
    storage = value.untyped_storage()
    return storage.nbytes() == value.nbytes and _num_holders(value) == 2


def _num_holders(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # not counting `storage` itself
