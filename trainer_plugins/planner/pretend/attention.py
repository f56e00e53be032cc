"""Which kernel attention takes on a card.

Without a card torch always takes the one that stores all scores.
"""

import math
from typing import Any

import torch
from torch.nn import functional

aten = torch.ops.aten

_FLASH_MAX_HEAD = 256
_AMPERE = (8, 0)
_MASK_ALIGNMENT = 16


def cuda_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    capability: tuple[int, int],
) -> Any:
    """`scaled_dot_product_attention` as CUDA chooses, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.

    In half precision without a mask flash, which knows groups of heads; with a mask, or in float32,
    the memory-efficient kernel, which does not; what neither takes is computed with all scores in
    memory. cuDNN's kernel, which some builds prefer on compute capability 9 and 10, keeps what
    flash keeps.

    Before compute capability 8.0 there is no flash, and no memory-efficient kernel for bfloat16.
    """
    if torch.is_autocast_enabled("cuda") and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if attn_mask is not None and attn_mask.dtype.is_floating_point:
            attn_mask = attn_mask.to(dtype)
    size = query.shape[-1]
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    has_flash = is_half and capability >= _AMPERE
    has_efficient = query.dtype != torch.float64 and (
        query.dtype != torch.bfloat16 or capability >= _AMPERE
    )
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # transformers/attention.cpp, convert_boolean_attn_mask: once a layer, and kept for the
        # backward.
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
            attn_mask.logical_not(), -math.inf
        )
    if has_flash and attn_mask is None and size <= _FLASH_MAX_HEAD and value.shape[-1] == size:
        missing = (-size) % 8
        given_scale = scale if scale is not None else size**-0.5
        if missing:
            query, key, value = (
                functional.pad(tensor, (0, missing)) for tensor in (query, key, value)
            )
        result = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=given_scale
        )[0]
        return result[..., :size] if missing else result
    has_groups = (
        enable_gqa and query.shape[1] != key.shape[1]
    )  # sdp_utils_cpp.h: only then the flag means anything
    if has_efficient and not has_groups and size % (8 if is_half else 4) == 0:
        if attn_mask is not None:
            attn_mask = _aligned(attn_mask)
            attn_mask = attn_mask.expand(
                query.shape[0], query.shape[1], query.shape[2], key.shape[2]
            )
        needs_gradient = torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (query, key, value)
        )
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, needs_gradient, dropout_p, is_causal, scale=scale
        )[0]
    if has_groups:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale
    )[0]


def _aligned(mask: Any) -> Any:
    """transformers/attention.cpp, pad_bias: the rows of a mask begin at multiples of 16 elements."""
    length = mask.shape[-1]
    missing = -length % _MASK_ALIGNMENT
    return functional.pad(mask, (0, missing))[..., :length] if missing else mask


def simgpu_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """As the simulated card chooses: what the CPU would take (testing/simgpu/attention.h).

    The CPU's flash kernel has no dropout, and takes no mask that needs a gradient; then all scores
    are stored.
    """
    if torch.is_autocast_enabled("simgpu"):
        dtype = torch.get_autocast_dtype("simgpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if attn_mask is not None and attn_mask.dtype.is_floating_point:
            attn_mask = attn_mask.to(dtype)
    needs_scores = dropout_p > 0 or (attn_mask is not None and attn_mask.requires_grad)
    if needs_scores:
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
                attn_mask.logical_not(), -math.inf
            )
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
            attn_mask.logical_not(), -math.inf
        )
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
