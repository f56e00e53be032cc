"""Know what autograd does in place on a card, but not on fake tensors."""

import sys
from pathlib import Path

import torch

aten = torch.ops.aten

_HOME = Path(__file__).parent.parent.parent
_OUR_MODES = (str(_HOME / "planner"), str(_HOME / "drycuda"))

# input_buffer.cpp, accumulate; FunctionsManual.cpp, areAnyTensorSubclassLike.
IN_PLACE = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
}


def is_autograds_own(tensor: object) -> bool:
    """Return whether autograd, without Python, writes to this tensor, which nothing else holds.

    It adds to such a tensor in place, but not where a mode is on (TensorSubclassLikeUtils.h,
    isTensorSubclassLike).
    """
    if torch.is_grad_enabled() or not isinstance(tensor, torch.Tensor) or _is_called_by_python():
        return False
    held_here = 2  # references: the tensor, and the Python object of the storage
    storage = tensor.untyped_storage()
    fills_storage = storage.nbytes() == tensor.numel() * tensor.element_size()
    return (
        fills_storage
        and torch._C._current_autograd_node() is not None
        and torch._C._storage_Use_Count(storage._cdata) == held_here
    )


def _is_called_by_python() -> bool:
    """Return whether Python code between autograd and an operation called that operation.

    Frames around every dispatch do not count: on a card they are absent.
    """
    frame = sys._getframe(2).f_back  # the caller of __torch_dispatch__
    wrapped = ("_dynamo", "_python_dispatch.py", "_compile.py", "torch/_ops.py", *_OUR_MODES)
    while frame is not None and any(name in frame.f_code.co_filename for name in wrapped):
        frame = frame.f_back
    # _engine_run_backward: a backward inside a backward
    return frame is not None and frame.f_code.co_name != "_engine_run_backward"
