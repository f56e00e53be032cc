"""Find the operations that autograd does in place on a card, but not on fake tensors.

Fake tensors are a subclass of Tensor, and autograd makes a new tensor for those. Imports torch.
"""

import sys
from pathlib import Path

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
"""Operations that autograd does in place, but not on a subclass of Tensor, with the ones in place.

torch/csrc/autograd: input_buffer.cpp, accumulate, adds a second gradient to the first one;
FunctionsManual.cpp and aten/src/ATen/native, areAnyTensorSubclassLike: a backward (of gather,
indexing, index_select, max) fills zeros.
"""


def is_autograds_own(tensor: object) -> bool:
    """Return whether autograd itself writes to this tensor, and nothing else holds its storage.

    If autograd calls an operation, there is no Python frame around it.
    """
    if torch.is_grad_enabled() or not isinstance(tensor, FakeTensor) or _is_called_by_python():
        return False
    held_here = 2  # references: the tensor, and the Python object of the storage
    storage = tensor.untyped_storage()
    is_whole = storage.nbytes() == tensor.numel() * tensor.element_size()
    return (
        is_whole
        and torch._C._current_autograd_node() is not None
        and torch._C._storage_Use_Count(storage._cdata) == held_here
    )


def _is_called_by_python() -> bool:
    """Return whether Python code between autograd and an operation called that operation.

    Frames around every dispatch do not count: those of torch, and those of the planner's own modes
    above the tracker (DDP, FSDP2 and ZeRO have one). On a card they are not there, and autograd
    adds in place.
    """
    frame = sys._getframe(2).f_back  # the caller of __torch_dispatch__
    wrapped = ("_dynamo", "_python_dispatch.py", "_compile.py", "torch/_ops.py", _PLANNER)
    while frame is not None and any(name in frame.f_code.co_filename for name in wrapped):
        frame = frame.f_back
    # _engine_run_backward: a backward inside a backward
    return frame is not None and frame.f_code.co_name != "_engine_run_backward"
