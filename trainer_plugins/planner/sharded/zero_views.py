"""One view in place of a view for each rank. Imports torch and DeepSpeed.

The engine cuts every buffer that it gathers into the part of each rank, and every gradient that it
reduces, in Python: with 1024 ranks that is all the time there is. Without bytes the parts of one
length are alike, so one of them stands for all. A view takes no memory, and lives as long as the
engine holds it.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch

_Key = tuple[int, int, int]


class LikeViews:
    """The views that live, by their tensor, dimension and length."""

    def __init__(self) -> None:
        self._alive: weakref.WeakValueDictionary[_Key, torch.Tensor] = weakref.WeakValueDictionary()

    def narrow(self, original: Any, tensor: Any, dim: int, start: int, length: int) -> Any:
        """`tensor.narrow`: partition_parameters.py, _all_gather_dtype and AllGatherCoalescedHandle.wait."""
        return self._one_for_all(
            (id(tensor), dim, length), lambda: original(tensor, dim, start, length)
        )

    def slice(self, original: Any, tensor: Any, index: Any) -> Any:
        """`tensor[start:stop]`: coalesced_collectives.py, reduce_scatter_coalesced."""
        if not isinstance(index, slice) or tensor.dim() != 1:
            return original(tensor, index)
        length = len(range(*index.indices(tensor.numel())))
        return self._one_for_all((id(tensor), 0, length), lambda: original(tensor, index))

    def _one_for_all(self, key: _Key, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        view = self._alive.get(key)
        if view is None:
            view = self._alive[key] = make()
        return view


@contextlib.contextmanager
def while_gathering() -> Iterator[None]:
    """Let parts that are narrowed be alike."""
    views, narrow = LikeViews(), torch.Tensor.narrow
    with patch.object(
        torch.Tensor, "narrow", lambda tensor, *args: views.narrow(narrow, tensor, *args)
    ):
        yield


@contextlib.contextmanager
def while_reducing() -> Iterator[None]:
    """Let parts that are sliced be alike."""
    views, getitem = LikeViews(), torch.Tensor.__getitem__
    with patch.object(
        torch.Tensor, "__getitem__", lambda tensor, index: views.slice(getitem, tensor, index)
    ):
        yield
