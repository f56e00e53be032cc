"""What kernels of a card need beside their results, as far as it is known, and where torch cannot say a result."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from trainer_plugins.allocator.model import MIN_BLOCK_BYTES
from trainer_plugins.units import KIB

aten = torch.ops.aten

_MATMULS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})

_CUBLASLT_WORKSPACE_BYTES = 1024 * KIB
"""aten/src/ATen/cuda/CublasHandlePool.cpp, parseCUDABlasLtWorkspaceSize."""


@dataclass(frozen=True, slots=True)
class KernelRules:
    """What the kernels of one compute capability take from the allocator."""

    capability: tuple[int, int]

    @property
    def cublas_workspace_bytes(self) -> int:
        """One for each thread with a handle: aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize."""
        return 4096 * 8 * KIB if self.capability[0] in (9, 10) else (4096 * 2 + 16 * 8) * KIB

    def workspaces(self, func: Any, args: Any) -> Iterator[tuple[str, int]]:
        """What libraries keep from their first use in a thread on, by name."""
        if func in _MATMULS:
            yield "cuBLAS", self.cublas_workspace_bytes
        if (
            func is aten.addmm.default and args[0].dim() == 1
        ):  # aten/src/ATen/native/cuda/Blas.cpp: a product and a bias
            yield "cuBLASLt", _CUBLASLT_WORKSPACE_BYTES

    def transient_bytes(self, func: Any, args: Any) -> int:
        """What a kernel takes while it runs and gives back before it returns."""
        rule = _TRANSIENT.get(func)
        return rule(args) if rule is not None else 0


def picks_by_mask(func: Any, args: Any) -> bool:
    """Whether the size of a result is the number of ones in a mask: `x[mask]`, and what it is made of."""
    if func is aten.masked_select.default:
        return True
    return func is aten.index.Tensor and any(
        each is not None and each.dtype == torch.bool for each in args[1]
    )


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation, around those whose result CUDA knows and torch's shape rules refuse.

    A mask has no values here: it picks everything, which is the most that it can.
    """
    if picks_by_mask(func, args):
        if func is aten.masked_select.default:
            return args[0].new_empty(aten.broadcast_tensors([args[0], args[1]])[0].numel())
        return func(args[0], [index for each in args[1] for index in _all_of(each)], **kwargs)
    if func is aten._grouped_mm.default and args[0].dtype == torch.float32:
        return func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **kwargs).float()
    return func(*args, **kwargs)


def _all_of(index: Any) -> list[Any]:
    if index is None or index.dtype != torch.bool:
        return [index]
    return [index.new_empty(index.numel(), dtype=torch.long) for _ in range(index.ndim)]


def _flash_backward(args: Any) -> int:
    """aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd: dq_accum and softmax_d, in float."""
    query, key = args[1], args[2]
    batch, heads, length, size = query.shape
    rows, columns = -(-length // 128) * 128, -(-size // 32) * 32
    needed = _rounded(4 * batch * heads * rows * columns) + _rounded(4 * batch * heads * rows)
    if key.shape[1] != heads:  # dk and dv of each head, before those of a group are added up
        needed += 2 * _rounded(batch * key.shape[2] * heads * size * query.element_size())
    return needed


def _efficient_backward(args: Any) -> int:
    """aten/src/ATen/native/transformers/cuda/attention_backward.cu: delta, and gradQ in float where it is not."""
    query = args[1]
    batch, heads, length, size = query.shape
    accumulator = _rounded(4 * batch * heads * length * size) if query.dtype != torch.float32 else 0
    return _rounded(4 * batch * heads * length) + accumulator


def _softmax_backward(args: Any) -> int:
    """aten/src/ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out: `Tensor tmp = grad * output`."""
    gradient, output = args[0], args[1]
    return _rounded(gradient.numel() * max(gradient.element_size(), output.element_size()))


def _copied_operands(args: Any) -> int:
    """aten/src/ATen/native/cuda/Blas.cpp, prepare_matrix_for_cublas and prepare_batch_matrix_for_cublas.

    cuBLAS reads a matrix by one stride, the other one being 1. What has no such stride is copied
    for the call: the gradient of a `sum()`, whose strides are 0, is the common case.
    """
    return sum(
        _rounded(each.numel() * each.element_size())
        for each in args[-2:]
        if not _has_leading_dimension(each)
    )


def _has_leading_dimension(matrix: Any) -> bool:
    (rows, columns), (down, across) = matrix.shape[-2:], matrix.stride()[-2:]
    if (down == 1 and across >= max(1, rows)) or (across == 1 and down >= max(1, columns)):
        return True
    if matrix.dim() == 2:  # is_non_overlapping_and_dense: one row, or one column, without holes
        return bool((rows == 1 and across == 1) or (columns == 1 and down == 1))
    return bool(matrix.is_contiguous()) and 0 not in (down, across)


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


_TRANSIENT: dict[Any, Callable[[Any], int]] = {
    **dict.fromkeys(_MATMULS, _copied_operands),
    aten._softmax_backward_data.default: _softmax_backward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}
