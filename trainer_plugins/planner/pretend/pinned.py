"""Pinned memory of the host, without a card that could pin it. Imports torch."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_plugins.planner.tracing.trace import Tracker

aten = torch.ops.aten


class PinnedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers what asks for pinned memory, and tells the tracker of it."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracker = tracker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it calls again for what happens on this rank
        if func is aten.is_pinned.default:
            return self._tracker.is_pinned(args[0])
        if func is aten._pin_memory.default:
            result = torch.empty_like(args[0])
        else:
            result = func(*args, **kwargs)
            if not _is_copied_to_host_meanwhile(func, args, kwargs):
                return result
        self._tracker.pin(result)
        return result


def _is_copied_to_host_meanwhile(func: Any, args: Any, kwargs: Any) -> bool:
    """aten/src/ATen/native/TensorConversions.cpp, _to_copy: a copy that nobody waits for goes to pinned memory."""
    if func is not aten._to_copy.default or not kwargs.get("non_blocking"):
        return False
    return (
        args[0].device.type != "cpu"
        and torch.device(kwargs.get("device") or args[0].device).type == "cpu"
    )
