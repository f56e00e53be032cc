"""Answer what a program asks of values that tensors without bytes do not have. Imports torch."""

import torch

from trainer_plugins.planner.plan import Moment
from trainer_plugins.planner.tracing.events import Storage
from trainer_plugins.planner.tracing.kernels import OperatorArgs
from trainer_plugins.planner.tracing.values import Asked

ALL_OF_A_MASK = "aten::all of a mask"
_MASK_DIMENSIONS = 2  # rows, and tokens
_OF_A_MAXIMUM = ("aten::lt", "aten::ge")
"""How a model checks labels against its vocabulary: `lt` holds, and `ge` does not."""

_DO_NOT_HOLD = (
    "aten::isnan",
    "aten::isinf",
    "aten::any",
    "aten::ne",
    "aten::lt",
    "aten::ge of a maximum",
)


def name_of(operation: str, args: OperatorArgs, source: Storage | None) -> str:
    """Return the name of an operation, and of what, if the answer depends on it.

    Args:
        operation: its name in aten.
        args: its arguments.
        source: where the first of them is.
    """
    if operation == "aten::all" and args[0].ndim == _MASK_DIMENSIONS:
        return ALL_OF_A_MASK
    if operation in _OF_A_MAXIMUM and source is not None and source.operation == "aten::max":
        return f"{operation} of a maximum"
    return operation


def answer(
    operation: str, dtype: torch.dtype, moment: Moment, made_by: Storage | None, asked: Asked
) -> bool | float | int:
    """Answer as a healthy run would: nothing is NaN, every check holds, and a loss is 1.

    Args:
        operation: what made the value.
        dtype: of the value.
        moment: when it is asked.
        made_by: where it is on the card; None if it is on the host.
        asked: what a model asks of numbers.
    """
    if operation == "aten::eq" and moment == "generation":
        return False  # no row has met its end
    if dtype == torch.bool:
        return operation not in _DO_NOT_HOLD
    if dtype.is_floating_point:
        # Before the optimizer steps, GradScaler asks whether it found infinities. A count of steps
        # is on the host.
        return 0.0 if moment == "optimizer step" and made_by is not None else 1.0
    return asked.count
