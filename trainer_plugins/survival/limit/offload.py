"""Offload: what a forward pass keeps for its backward waits in main memory.

With checkpointing that is little. Each byte that is kept crosses the bus twice, and takes a byte of
main memory. The numbers stay the same.
"""

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

_Packed = torch.Tensor | tuple[torch.device, torch.Tensor]
"""A tensor that stays where it is, or its device and its copy in main memory."""


class Offload:
    """Offloads the activations of one model, from its next forward pass until `remove`."""

    def __init__(self, model: nn.Module) -> None:
        self._entered: list[saved_tensors_hooks] = []
        self._weights: set[int] = set()
        self._handles = (
            model.register_forward_pre_hook(self._enter),
            # called after a pass that fails, too
            model.register_forward_hook(self._leave, always_call=True),
        )

    @staticmethod
    def is_possible(model: nn.Module) -> bool:
        """Tell whether the model is on a card, and not sharded.

        Gathered weights could not be told from activations.
        """
        weights = list(model.parameters())
        return all(
            one.device.type not in ("cpu", "meta")
            and not hasattr(one, "_local_tensor")
            and not hasattr(one, "ds_id")
            for one in weights
        )

    def remove(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, model: nn.Module, _: object) -> None:
        self._weights = {_storage(one) for one in (*model.parameters(), *model.buffers())}
        hooks = saved_tensors_hooks(self._pack, _unpack)
        hooks.__enter__()
        self._entered.append(hooks)

    def _leave(self, *_: object) -> None:
        self._entered.pop().__exit__()

    def _pack(self, tensor: torch.Tensor) -> _Packed:
        if tensor.device.type == "cpu" or _storage(tensor) in self._weights:
            return tensor
        return tensor.device, tensor.to("cpu")


def _unpack(packed: _Packed) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    device, tensor = packed
    return tensor.to(device)


def _storage(tensor: torch.Tensor) -> int:
    # not the address of its bytes, which come and go if the base is streamed
    return int(tensor.untyped_storage()._cdata)
