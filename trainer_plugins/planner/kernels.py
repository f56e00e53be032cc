"""Says which kernel CUDA takes for torch's attention. Imports no torch."""

from typing import Literal

Kernel = Literal["flash", "memory-efficient", "all scores"]
"""A kernel, or what torch falls back to: all scores in memory, as in eager attention."""

_FLASH_MAX_HEAD = 256
_AMPERE = (8, 0)


def attention_kernel(
    dtype: str,
    head_size: int,
    value_size: int,
    capability: tuple[int, int],
    has_mask: bool,
    has_groups: bool = False,
) -> Kernel:
    """Return the kernel that `scaled_dot_product_attention` takes on a card.

    In half precision without a mask, that is flash, which can share keys among groups of heads.
    With a mask or in float32 it is the memory-efficient kernel, which cannot. On compute capability
    9 and 10 some builds prefer cuDNN's kernel, which keeps the same as flash.

    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.

    Args:
        dtype: what is computed in, as torch names it: `bfloat16`.
        head_size: the numbers of a head in a query.
        value_size: the numbers of a head in a value.
        capability: the compute capability of the card.
        has_mask: whether there is a mask beside a causal one.
        has_groups: whether groups of heads share keys.
    """
    is_half = dtype in ("float16", "bfloat16")
    fits_flash = is_half and value_size == head_size <= _FLASH_MAX_HEAD
    if fits_flash and capability >= _AMPERE and not has_mask:
        return "flash"
    has_kernel = dtype != "float64" and (dtype != "bfloat16" or capability >= _AMPERE)
    if has_kernel and head_size % (8 if is_half else 4) == 0 and not has_groups:
        return "memory-efficient"
    return "all scores"
