"""What autograd does in place, and does not to fake tensors because they are a subclass of Tensor.

Imports torch.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_PLANNER = str(Path(__file__).parent.parent)

IN_PLACE = {
    torch.ops.aten.add.Tensor: torch.ops.aten.add_.Tensor,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
    torch.ops.aten.index_put.default: torch.ops.aten.index_put_.default,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
    torch.ops.aten.scatter.value: torch.ops.aten.scatter_.value,
}
"""What autograd does in place, but not to a subclass of Tensor, which a fake tensor is.

torch/csrc/autograd: input_buffer.cpp, accumulate, where a second gradient comes to a first one;
FunctionsManual.cpp and aten/src/ATen/native, areAnyTensorSubclassLike, where a backward (gather,
indexing, index_select, max) fills zeros.
"""


def is_autograds_own(tensor: Any) -> bool:
    """Whether autograd itself writes to this tensor, and nobody else holds it or its storage.

    Called by autograd there is no Python around the operation.
    """
    if torch.is_grad_enabled() or not isinstance(tensor, FakeTensor) or _is_called_by_python():
        return False
    core: Any = torch._C
    held_here = 2  # by the tensor, and by the Python object of the storage
    storage = tensor.untyped_storage()
    is_whole = storage.nbytes() == tensor.numel() * tensor.element_size()
    return (
        is_whole
        and core._current_autograd_node() is not None
        and core._storage_Use_Count(storage._cdata) == held_here
    )


def _is_called_by_python() -> bool:
    """Whether there is Python between an operation and autograd, more than what is wrapped around a dispatch.

    That is what torch wraps around it, and the planner's own modes above the tracker (DDP, FSDP2
    and ZeRO have one): on a card they are not there, and autograd adds in place.
    """
    frame = sys._getframe(2).f_back  # what called __torch_dispatch__
    wrapped = ("_dynamo", "_python_dispatch.py", "_compile.py", "torch/_ops.py", _PLANNER)
    while frame is not None and any(name in frame.f_code.co_filename for name in wrapped):
        frame = frame.f_back
    return (
        frame is not None and frame.f_code.co_name != "_engine_run_backward"
    )  # a backward in a backward
