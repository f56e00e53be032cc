"""Simulate pinned memory of the host, without a card that could pin it. Imports torch."""

from collections.abc import Iterable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_plugins.planner.tracing.kernels import Operator, OperatorArgs, OperatorKwargs
from trainer_plugins.planner.tracing.trace import Tracker

aten = torch.ops.aten


class PinnedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers operations on pinned memory, and tells the tracker what is pinned."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracker = tracker

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Iterable[type],
        args: OperatorArgs = (),
        kwargs: OperatorKwargs | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # DTensor calls again with the operations of this rank
        if func is aten.is_pinned.default:
            return self._tracker.host.is_pinned(args[0])
        if func is aten._pin_memory.default:
            result = torch.empty_like(args[0])
        else:
            result = func(*args, **kwargs)
            if not _is_copied_to_host_meanwhile(func, args, kwargs):
                return result
        self._tracker.host.pin(result, self._tracker.moment)
        return result


def _is_copied_to_host_meanwhile(
    func: Operator, args: OperatorArgs, kwargs: OperatorKwargs
) -> bool:
    """Return whether this is an asynchronous copy to the host, which goes to pinned memory.

    aten/src/ATen/native/TensorConversions.cpp, _to_copy.
    """
    if func is not aten._to_copy.default or not kwargs.get("non_blocking"):
        return False
    return (
        args[0].device.type != "cpu"
        and torch.device(kwargs.get("device") or args[0].device).type == "cpu"
    )
