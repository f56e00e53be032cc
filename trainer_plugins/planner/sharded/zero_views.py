"""Make one view in place of a view for each rank. Imports torch.

In Python, the engine cuts every gathered buffer and every reduced gradient into the parts of all
ranks. With 1024 ranks that would take nearly all of the time. Without bytes, parts of the same
length are alike, so one view serves for all. A view takes no memory, and lives as long as the
engine holds it.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch

_Key = tuple[int, int, int]
_Original = Callable[..., torch.Tensor]


class LikeViews:
    """Keeps the live views by their tensor, dimension and length."""

    def __init__(self) -> None:
        self._alive: weakref.WeakValueDictionary[_Key, torch.Tensor] = weakref.WeakValueDictionary()

    def narrow(
        self, original: _Original, tensor: torch.Tensor, dim: int, start: int, length: int
    ) -> torch.Tensor:
        """Return a view for `tensor.narrow`.

        partition_parameters.py, _all_gather_dtype and AllGatherCoalescedHandle.wait.
        """
        return self._one_for_all(
            (id(tensor), dim, length), lambda: original(tensor, dim, start, length)
        )

    def slice(self, original: _Original, tensor: torch.Tensor, index: object) -> torch.Tensor:
        """Return a view for `tensor[start:stop]`.

        coalesced_collectives.py, reduce_scatter_coalesced.
        """
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
    """Make one view for all parts of the same length that `narrow` cuts."""
    views, narrow = LikeViews(), torch.Tensor.narrow
    with patch.object(
        torch.Tensor, "narrow", lambda tensor, *args: views.narrow(narrow, tensor, *args)
    ):
        yield


@contextlib.contextmanager
def while_reducing() -> Iterator[None]:
    """Make one view for all parts of the same length that a slice cuts."""
    views, getitem = LikeViews(), torch.Tensor.__getitem__
    with patch.object(
        torch.Tensor, "__getitem__", lambda tensor, index: views.slice(getitem, tensor, index)
    ):
        yield
