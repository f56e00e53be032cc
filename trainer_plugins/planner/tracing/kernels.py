"""Know what a card's kernels allocate besides results, or do without shape rules."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from trainer_plugins.units import KIB

aten = torch.ops.aten

Operator: TypeAlias = Callable[..., Any]  # an overload of an operation
OperatorArgs: TypeAlias = Sequence[Any]
OperatorKwargs: TypeAlias = Mapping[str, Any]

_PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
_WITH_DTYPE_OUT = frozenset(each.dtype_out for each in _PRODUCTS)
_MATMULS = _WITH_DTYPE_OUT.union(*((each.default, each.out, each.dtype) for each in _PRODUCTS))

_TORCH = [*map(int, torch.__version__.split(".")[:2])]
_LT_HAS_ITS_OWN = _TORCH < [2, 12]
# Of 2.10 to 2.14 on the dry card, 2.13 alone takes no workspace for a batch of outer products.
# Rotary embeddings begin with one.
_MULTIPLIES_OUTER = _TORCH == [2, 13]
_CUBLASLT_WORKSPACE_BYTES = 1024 * KIB  # CublasHandlePool.cpp, parseCUDABlasLtWorkspaceSize
_FOREACH_CHUNK = 65536  # elements: kChunkSize of MultiTensorApply.cuh
_SORTED_IN_A_BLOCK = 4096
_RADIX_TILE = {8: 3840, 9: 4608}  # by the first number of a compute capability
_CUDNN_ENGINE_BYTES = 256  # of attention, with torch 2.11 on an H100 (docs/on_a_card.md)


@dataclass(frozen=True, slots=True)
class KernelRules:
    """Holds what the kernels of one compute capability take from the allocator."""

    capability: tuple[int, int]
    num_multiprocessors: int
    num_threads: int = 2048  # of a multiprocessor

    @property
    def cublas_workspace_bytes(self) -> int:
        """Return the workspace of each thread: CublasHandlePool.cpp, parseChosenWorkspaceSize."""
        return 4096 * 8 * KIB if self.capability[0] in (9, 10) else (4096 * 2 + 16 * 8) * KIB

    def workspaces(self, func: Operator, args: OperatorArgs) -> Iterator[tuple[str, int]]:
        """Yield the libraries of an operation, and the bytes each keeps for a thread."""
        is_outer = func is aten.bmm.default and args[0].shape[-1] == 1
        if func in _MATMULS and not (is_outer and _MULTIPLIES_OUTER):
            yield "cuBLAS", self.cublas_workspace_bytes
        # aten/src/ATen/native/cuda/Blas.cpp: a product and a bias; since 2.12 both use one
        if _LT_HAS_ITS_OWN and func is aten.addmm.default and args[0].dim() == 1:
            yield "cuBLASLt", _CUBLASLT_WORKSPACE_BYTES

    def transients(self, func: Any, args: OperatorArgs) -> list[int]:
        """Return the sizes in bytes that a kernel takes while it runs."""
        rule = _TRANSIENT.get(func) or _OF_LIBRARIES.get(func._schema.name)
        return rule(self, args) if rule is not None else []

    def in_turn(self, func: Operator, made: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the results of an operation in the order in which a kernel makes them."""
        last = _MADE_LAST.get(func, 0)
        return made[last:] + made[:last]

    def copies(self, func: Operator, args: OperatorArgs) -> list[int]:
        """Return the sizes in bytes of inputs that are copied before a result is made."""
        return _copied_input(args[0]) if func in _COPY_FIRST else []


def picks_by_mask(func: Operator, args: OperatorArgs) -> bool:
    """Return whether the size of the result is the number of ones in a mask, as in `x[mask]`."""
    if func is aten.masked_select.default:
        return True
    if func is aten.nonzero.default:  # of a mask of rows
        return bool(args[0].dtype == torch.bool and args[0].ndim == 1)
    return func is aten.index.Tensor and any(
        each is not None and each.dtype == torch.bool for each in args[1]
    )


def run(func: Operator, args: OperatorArgs, kwargs: OperatorKwargs) -> object:
    """Run an operation, even one that torch's shape rules refuse; a mask selects everything."""
    if picks_by_mask(func, args):
        if func is aten.nonzero.default:
            return args[0].new_empty((args[0].numel(), 1), dtype=torch.long)
        if func is aten.masked_select.default:
            return args[0].new_empty(aten.broadcast_tensors([args[0], args[1]])[0].numel())
        return func(args[0], [index for each in args[1] for index in _all_of(each)], **kwargs)
    if func is aten._amp_foreach_non_finite_check_and_unscale_.default and any(
        each.dtype == torch.bfloat16 for each in args[0]
    ):
        raise NotImplementedError(
            "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'"
        )
    if func is torch.ops._c10d_functional.wait_tensor.default:
        return args[0]
    if func in _WITH_DTYPE_OUT:  # torch 2.11 has no right rule for addmm's
        return kwargs["out"]
    if func is aten._pin_memory.default:  # there is no card that could pin it
        return torch.empty_like(args[0])
    if func is aten._scaled_dot_product_efficient_attention.default:
        # attention.cu: the seed and the offset of its dropout are in main memory
        return *func(*args, **kwargs)[:2], *(torch.empty((), dtype=torch.long) for _ in "so")
    if func is aten._scaled_dot_product_cudnn_attention.default and not args[4]:
        made = func(*args, **kwargs)  # without a backward pass it keeps no logarithms of sums
        return made[0], made[1].new_empty(0), *made[2:]
    if func is aten._grouped_mm.default and args[0].dtype in (torch.float32, torch.float16):
        # the shape rule refuses what CUDA's code does not
        return func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **kwargs).to(args[0].dtype)
    return func(*args, **kwargs)


def _all_of(index: torch.Tensor | None) -> list[torch.Tensor | None]:
    if index is None or index.dtype != torch.bool:
        return [index]
    return [index.new_empty(index.numel(), dtype=torch.long) for _ in range(index.ndim)]


def _flash_forward(rules: KernelRules, args: OperatorArgs) -> list[int]:
    """Count what parts of few and short rows are summed up from: flash_api.cpp, splitkv."""
    query, key = args[0], args[1]
    dropout = args[3] if len(args) > 3 else 0.0
    batch, heads, length, size = query.shape
    keys = 256 if size <= 64 else 128 if size <= 128 else 64
    places = 2 * rules.num_multiprocessors
    parts = _splits(batch * heads * -(-length // 64), places, -(-key.shape[2] // keys))
    if dropout or parts == 1:
        return []
    rows, columns = parts * batch * heads * length, -(-size // 32) * 32
    return [4 * rows, 4 * rows * columns]


def _splits(blocks: int, places: int, of_keys: int) -> int:
    """Return into how many parts flash divides the keys: num_splits_heuristic of flash_api.cpp."""
    if not blocks * of_keys or blocks >= 0.8 * places:
        return 1
    most = min(128, places, of_keys)
    eligible = [
        n for n in range(1, most + 1) if n == 1 or -(-of_keys // n) != -(-of_keys // (n - 1))
    ]
    share = {n: blocks * n / places / math.ceil(blocks * n / places) for n in eligible}
    return next(n for n in eligible if share[n] >= 0.85 * max(share.values()))


def _flash_backward(_: KernelRules, args: OperatorArgs) -> list[int]:
    """Count softmax_d and dq_accum, both in float: cuda/flash_attn/flash_api.cpp, mha_bwd."""
    query, key = args[1], args[2]
    batch, heads, length, size = query.shape
    rows, columns = -(-length // 128) * 128, -(-size // 32) * 32
    needed = [4 * batch * heads * rows, 4 * batch * heads * rows * columns]
    if key.shape[1] != heads:  # dk and dv of each head, before they are summed up by group
        needed += [batch * key.shape[2] * heads * size * query.element_size()] * 2
    return needed


def _efficient_backward(rules: KernelRules, args: OperatorArgs) -> list[int]:
    """Count delta, and the workspace: cuda/attention_backward.cu, kernel_backward.h.

    It holds blocks of gradQ with a lock each, and gradK and gradV in float where the registers
    cannot hold them. For float, torch computes delta from the whole product.
    """
    query, key = args[1], args[2]
    batch, heads, length, size = query.shape
    is_half = query.dtype != torch.float32
    rows, columns = 64, 64
    if size > 64 and rules.capability >= (8, 0):
        rows, columns = 128, 128 if is_half and size <= 128 else 64
    blocks = -(-length // rows) * -(-size // columns)
    of_keys = 8 * -(-key.shape[2] // 64) * 64 * size if is_half and size > 128 else 0
    workspace = batch * heads * (blocks * (4 * rows * columns + 16) + of_keys)
    delta = 4 * batch * heads * length
    return [delta, workspace] if is_half else [delta, delta, max(workspace, delta * size)]


def _cudnn_forward(_: KernelRules, __: OperatorArgs) -> list[int]:
    return [_CUDNN_ENGINE_BYTES]


def _cudnn_backward(_: KernelRules, args: OperatorArgs) -> list[int]:
    """Count gradQ and the sums in float (cudnn-frontend), and what an engine takes."""
    query = args[1]
    return [4 * query.numel() + 4 * query[..., 0].numel() + _CUDNN_ENGINE_BYTES]


def _embedding_backward(_: KernelRules, args: OperatorArgs) -> list[int]:
    """Count what sums the rows of many tokens: EmbeddingBackwardKernel.cu, ten rows a part.

    Two numbers say how many parts there are.
    """
    gradient, indices, num_weights = args[:3]
    num, size = indices.numel(), indices.element_size()
    if num <= 3072 and not args[4]:  # Embedding.cu, embedding_dense_backward_cuda
        return []
    parts = min(num, num_weights) + num // 10
    return [*[size * num] * 5, 8, 8, size * parts, 4 * parts * gradient.shape[-1]]


def _norms(_: KernelRules, args: OperatorArgs) -> list[int]:
    """Count the sums of each tensor's chunks: ForeachReduceOp.cu, foreach_tensor_norm_cuda."""
    tensors = args[0]
    chunks = -(-max(each.numel() for each in tensors) // _FOREACH_CHUNK)
    return [len(tensors) * chunks * max(4, tensors[0].element_size())]


def _sum(rules: KernelRules, args: OperatorArgs) -> list[int]:
    """Count what blocks hand to each other where few sums of many rows are divided among them.

    native/cuda/Reduce.cuh, setReduceConfig and global_memory_size, for sums that keep the last
    dimension, as of the gradients of norms and biases. Others need next to nothing.
    """
    summed, dims = args[0], [dim % args[0].dim() for dim in args[1] or ()]
    last = summed.dim() - 1
    if not summed.is_floating_point():
        return _as_integers(rules, args)
    if not dims or last in dims or not summed.numel():
        return []
    rows = math.prod(summed.shape[dim] for dim in dims)
    sums = summed.numel() // rows
    together = next(n for n in (4, 2, 1) if summed.shape[last] % n == 0)
    most = 512 // together  # threads of a block
    wide = min(_power_of_2(sums // together, most), 32)
    high = min(_power_of_2(rows, most), most // wide)
    wide = min(_power_of_2(sums // together, most), most // high)
    each = -(-rows // high) if rows >= min(16 * high, 256) else rows
    grid = -(-sums // (together * wide))
    places = rules.num_multiprocessors * (rules.num_threads // (wide * high))
    if each == rows or each < 256 or grid > places:
        return []
    parts = max(min(-(-places // grid), -(-each // 16)), -(-each // 256))
    return [4 * sums * parts * wide * together] if parts > 1 else []


def _power_of_2(number: int, most: int) -> int:
    return most if number >= most else 1 << max(0, number.bit_length() - 1)


def _as_integers(_: KernelRules, args: OperatorArgs) -> list[int]:
    """Count what is summed as int64: native/ReduceOpsUtils.h, make_reduction_from_out_ty."""
    summed = args[0]
    is_wide = summed.dtype == torch.int64 or summed.is_floating_point()
    return [] if is_wide else [8 * summed.numel()]


def _cumsum(_: KernelRules, args: OperatorArgs) -> list[int]:
    """Count what CUB's scan of a row takes, if one pass of a block does it: cuda/ScanUtils.cuh."""
    return [1023] if args[0].dim() == 1 else _as_integers(_, args)


def _grouped(rules: KernelRules, args: OperatorArgs) -> list[int]:
    """Count pointers, shapes and strides of the groups, and what describes their tiles.

    native/cuda/GroupMM.cu, bf16bf16_grouped_gemm_impl_sm90_sm100; CUTLASS keeps four descriptors of
    128 bytes for each multiprocessor. Compared with torch 2.13 on the dry card, of capability 9.
    """
    if rules.capability[0] != 9 or args[0].dtype != torch.bfloat16:
        return []
    groups = next((len(each) for each in args[:2] if each.dim() == 3), 0) or len(args[2])
    return [
        3 * 8 * (groups + groups % 2) + (12 + 3 * 8) * groups,
        4 * 128 * rules.num_multiprocessors,
    ]


def _split_copy(rules: KernelRules, args: OperatorArgs) -> list[int]:
    """Count the addresses and the map of blocks: FSDP2 takes a gathered layer apart with them.

    native/cuda/TensorShape.cu, split_with_sizes_copy_out_cuda_contiguous_no_cast: 64-bit numbers.
    """
    gathered, numels = args[:2]
    parts = [gathered.element_size() * numel for numel in numels if numel]
    chunks = gathered.shape[0]  # one of each rank
    places = rules.num_multiprocessors * rules.num_threads // 128 * 2
    rounds = -(-chunks * sum(-(-part // 2048) for part in parts) // places)
    rounds = -(-rounds // min(math.ceil(math.sqrt(rounds)), chunks))
    return [8 * (4 * len(parts) + 1 + sum(-(-part // (2048 * rounds)) for part in parts))]


def _sort(rules: KernelRules, args: OperatorArgs) -> list[int]:
    """Count positions, and what CUB's radix sort needs of 64-bit numbers in one row.

    native/cuda/Sort.cpp, sort_cuda_kernel: up to 4096 are sorted in a block. CUB's cub/device/
    dispatch/tuning/tuning_radix_sort.cuh has the tile of each capability. As on the dry card.
    """
    numbers = args[0]
    if numbers.dim() != 1 or numbers.dtype != torch.int64:
        return []
    positions = 8 * len(numbers)
    if len(numbers) <= _SORTED_IN_A_BLOCK:
        return [positions]
    tiles = -(-len(numbers) // _RADIX_TILE.get(rules.capability[0], _RADIX_TILE[9]))
    return [positions, 2 * (-(-positions // 256) * 256) + 66 * 256 + 1024 * tiles - 1]


def _safe_softmax(_: KernelRules, args: OperatorArgs) -> list[int]:
    """Count which scores are masked, and which rows: native/transformers/attention.cpp."""
    scores = args[0]
    rows = scores.numel() // scores.shape[args[1]]
    return [scores.numel(), rows, scores.element_size()]


def _softmax_backward(_: KernelRules, args: OperatorArgs) -> list[int]:
    """Count `tmp = grad * output`: native/cuda/SoftMax.cu, softmax_backward_cuda_out."""
    gradient, output = args[0], args[1]
    return [gradient.numel() * max(gradient.element_size(), output.element_size())]


def _copied_input(given: torch.Tensor) -> list[int]:
    """Count an input that is copied since its elements do not follow each other.

    native/cuda/layer_norm_kernel.cu, layer_norm_cuda; native/cudnn/ConvShared.cpp, where a picture
    may be in another order, but not a row of sound.
    """
    return [] if given.is_contiguous() or given.dim() == 4 else [given.nbytes]


def _copied_operands(_: KernelRules, args: OperatorArgs) -> list[int]:
    """Count the operands of a matrix product that are copied for the call.

    cuBLAS reads a matrix by one stride; the other has to be 1. aten/src/ATen/native/cuda/Blas.cpp,
    prepare_matrix_for_cublas and prepare_batch_matrix_for_cublas.
    """
    matrices = [each for each in args if isinstance(each, torch.Tensor)][-2:]
    return [
        each.numel() * each.element_size() for each in matrices if not _has_leading_dimension(each)
    ]


def _has_leading_dimension(matrix: torch.Tensor) -> bool:
    (rows, columns), (down, across) = matrix.shape[-2:], matrix.stride()[-2:]
    if (down == 1 and across >= max(1, rows)) or (across == 1 and down >= max(1, columns)):
        return True
    if matrix.dim() == 2:  # is_non_overlapping_and_dense: one row, or one column, without holes
        return bool((rows == 1 and across == 1) or (columns == 1 and down == 1))
    return bool(matrix.is_contiguous()) and 0 not in (down, across)


_TRANSIENT: dict[Operator, Callable[[KernelRules, OperatorArgs], list[int]]] = {
    **dict.fromkeys(_MATMULS, _copied_operands),
    aten.convolution_backward.default: lambda _, args: _copied_input(args[1]),
    aten._safe_softmax.default: _safe_softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._foreach_norm.Scalar: _norms,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.sum.default: _as_integers,
    aten.cumsum.default: _cumsum,
    aten.sum.dim_IntList: _sum,
    # native/TensorCompare.cpp: self.abs() == inf
    aten.isinf.default: lambda _, args: [args[0].nbytes] * args[0].is_floating_point(),
    aten.sort.default: _sort,
    aten.sort.stable: _sort,
    aten._grouped_mm.default: _grouped,
    aten.mean.dim: _sum,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn_forward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    aten._scaled_dot_product_flash_attention.default: _flash_forward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}

# by name: torch has them once it has imported FSDP2
_OF_LIBRARIES = {"fsdp::split_with_sizes_copy": _split_copy}

_COPY_FIRST = {aten.native_layer_norm.default, aten.convolution.default}
_MADE_LAST: dict[Operator, int] = {  # how many results are made after the others
    aten.native_dropout.default: 1,  # Dropout.cu, dropout_cuda: its mask is first
    # attention.cu, _cudnn_attention_forward: the seed and the offset of its dropout are first
    aten._scaled_dot_product_cudnn_attention.default: 2,
}
