"""Answer what a program asks of values, where tensors have no bytes, as in a healthy run.

Numbers that cut tensors, such as heights and widths of pictures, are computed.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from trainer_plugins.planner.plan import Moment
from trainer_plugins.planner.tracing import kernels
from trainer_plugins.planner.tracing.events import Storage
from trainer_plugins.planner.tracing.kernels import Operator, OperatorArgs, OperatorKwargs

aten = torch.ops.aten

_MOST_NUMBERS = 1 << 20
_MAKE_NUMBERS = frozenset(
    {
        aten.arange.default,
        aten.arange.start,
        aten.arange.start_step,
        aten.zeros.default,
        aten.ones.default,
        aten.full.default,
        aten.scalar_tensor.default,
    }
)
_SIZED_BY_VALUES = frozenset(
    {
        aten.repeat_interleave.Tensor,
        aten.nonzero.default,
        aten.masked_select.default,
        aten.unique_consecutive.default,
        aten.index.Tensor,
    }
)

ALL_OF_A_MASK = "aten::all of a mask"
_MASK_DIMENSIONS = 2  # rows, and tokens
_OF_A_MAXIMUM = ("aten::lt", "aten::ge")  # labels against a vocabulary: `lt` holds, `ge` does not

_DO_NOT_HOLD = (
    "aten::isnan",
    "aten::isinf",
    "aten::any",
    "aten::ne",
    "aten::lt",
    "aten::ge of a maximum",
)


@dataclass(frozen=True, slots=True)
class Asked:
    """Says what a model asks of the numbers in its batches."""

    are_kept: bool = False  # whether the numbers that a program writes down are kept
    count: int = 1  # the answer to a count that is not known


NOTHING = Asked()


class Values:
    """Computes what is made of numbers that a program writes down: a list, a range, or zeros."""

    def __init__(self) -> None:
        self.asked = NOTHING
        self.ones_of_a_row: int | None = None  # of a mask of rows x tokens, where that is known
        self._known: Any = WeakTensorKeyDictionary()

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a tensor; None if they are not known."""
        found: torch.Tensor | None = self._known.get(tensor) if self.asked.are_kept else None
        return found

    def told(self, tensor: torch.Tensor) -> Any:
        """Return the values of a tensor as numbers of Python; None if they are not known."""
        values = self.of(tensor)
        with _disable_current_modes():
            return values.tolist() if values is not None else None

    def counted(self, func: Operator, args: OperatorArgs) -> OperatorArgs:
        """Replace masks that are known by the places of their ones, as in `x[mask]`."""
        if func is not aten.index.Tensor:
            return args
        return args[0], [place for each in args[1] for place in self._places(each)]

    def _places(self, index: torch.Tensor | None) -> list[torch.Tensor | None]:
        if index is not None and index.dtype == torch.bool and self.ones_of_a_row is not None:
            ones = index.shape[0] * self.ones_of_a_row
            return [index.new_empty(ones, dtype=torch.long) for _ in range(index.ndim)]
        values = self.of(index) if isinstance(index, FakeTensor) else None
        if index is None or values is None or values.dtype != torch.bool:
            return [index]
        with _disable_current_modes():
            places = values.nonzero().unbind(1)
        made = [index.new_empty(len(each), dtype=torch.long) for each in places]
        for tensor, each in zip(made, places, strict=True):
            self._known[tensor] = each
        return [*made]

    def run(self, func: Operator, args: OperatorArgs, kwargs: OperatorKwargs) -> object:
        """Run an operation, and keep the values of its results if those of its inputs are known."""
        known = self._computed(func, args, kwargs) if self.asked.are_kept else None
        if known is None:
            return kernels.run(func, args, kwargs)
        if func in _SIZED_BY_VALUES and isinstance(args[0], FakeTensor):
            made = tree_map(lambda each: torch.empty_like(each, device=args[0].device), known)
        else:
            made = func(*args, **kwargs)
        for tensor, values in zip(tree_leaves(made), tree_leaves(known), strict=True):
            if isinstance(tensor, FakeTensor) and not values.is_floating_point():
                self._known[tensor] = values
        return made

    def _computed(self, func: Any, args: OperatorArgs, kwargs: OperatorKwargs) -> object | None:
        """Run an operation on values; None if one is not known, or if it is not about numbers."""
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        is_on_host = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        if not tensors and not (func in _MAKE_NUMBERS and is_on_host):
            return None
        with _disable_current_modes():
            if any(self._values(each) is None for each in tensors):
                for written in tree_leaves(args[:1]) if func._schema.is_mutable else ():
                    if isinstance(written, FakeTensor):
                        self._known.pop(written, None)
                return None
            given, named = tree_map(self._values, (args, dict(kwargs)))
            if "device" in named:
                named["device"] = torch.device("cpu")
            found: object = func(*given, **named)
        return found

    def _values(self, given: Any) -> Any:
        """Return what stands for an argument: the values of a tensor or None; else itself."""
        if not isinstance(given, torch.Tensor):
            return given
        if isinstance(given, FakeTensor):
            return self.of(given)
        return given.cpu() if given.numel() <= _MOST_NUMBERS else None


def name_of(operation: str, args: OperatorArgs, source: Storage | None) -> str:
    """Return the name of an operation, with what it is of where the answer depends on that."""
    if operation == "aten::all" and args[0].ndim == _MASK_DIMENSIONS:
        return ALL_OF_A_MASK
    if operation in _OF_A_MAXIMUM and source is not None and source.operation == "aten::max":
        return f"{operation} of a maximum"
    return operation


def healthy_answer(
    operation: str, dtype: torch.dtype, moment: Moment, is_on_card: bool, asked: Asked
) -> bool | float | int:
    """Answer as a healthy run would: nothing is NaN, every check holds, and a loss is 1."""
    if operation == "aten::eq" and moment == "generation":
        return False  # no row has met its end
    if dtype == torch.bool:
        return operation not in _DO_NOT_HOLD
    if dtype.is_floating_point:
        # Before the optimizer steps, GradScaler asks whether it found infinities. A count of steps
        # is on the host.
        return 0.0 if moment == "optimizer step" and is_on_card else 1.0
    return asked.count
