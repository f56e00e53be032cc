"""Compute attention by the kernel that a card would take: torch alone would store all scores.

A tensor that is replaced here must not be kept by another name: it would be counted as allocated
while the kernel runs.
"""

import math
from typing import TypeAlias

import torch
from torch.nn import functional

from trainer_plugins.planner.cards import attention_kernel

aten = torch.ops.aten

_MASK_ALIGNMENT = 8  # elements

_Mask: TypeAlias = torch.Tensor | None


def cuda_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    capability: tuple[int, int],
    prefers_cudnn: bool,
) -> torch.Tensor:
    """Compute `scaled_dot_product_attention` by the kernel that CUDA chooses."""
    if torch.is_autocast_enabled("cuda") and query.dtype != torch.float64:
        query, key, value, attn_mask = _in_autocast("cuda", query, key, value, attn_mask)
    attn_mask = _added(attn_mask, query.dtype)
    size, missing = query.shape[-1], 0
    # sdp_utils_cpp.h: without groups the flag means nothing
    has_groups = enable_gqa and query.shape[1] != key.shape[1]
    kernel = attention_kernel(
        str(query.dtype).removeprefix("torch."),
        size,
        value.shape[-1],
        capability,
        has_mask=attn_mask is not None,
        has_groups=has_groups,
        asks_cudnn=prefers_cudnn
        and torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
        and key.shape[2] > 1
        and float(dropout_p * 16).is_integer()  # TRL sets it to the integer 0
        and not (attn_mask is not None and attn_mask.requires_grad),
    )
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    result: torch.Tensor
    if kernel == "cuDNN":
        result = aten._scaled_dot_product_cudnn_attention(
            query, key, value, attn_mask, trains, dropout_p, is_causal, False, scale=scale
        )[0]
    elif kernel == "flash":
        scale = scale if scale is not None else size**-0.5
        if missing := -size % 8:
            query, key, value = (functional.pad(each, (0, missing)) for each in (query, key, value))
        result = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    elif kernel == "memory-efficient":
        attn_mask = _aligned(attn_mask, (*query.shape[:3], key.shape[2]))
        result = aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, trains, dropout_p, is_causal, scale=scale
        )[0]
    else:
        if has_groups:
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        with torch.autocast("cuda", enabled=False):  # its products are in float32
            result = aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale
            )[0]
    del attn_mask  # in C++ it is released before what autocast has made around it
    return result[..., :size] if missing else result


def simgpu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute attention as testing/simgpu/attention.h: no flash with dropout, or mask gradient."""
    if torch.is_autocast_enabled("simgpu"):
        query, key, value, attn_mask = _in_autocast("simgpu", query, key, value, attn_mask)
    needs_scores = dropout_p > 0 or (attn_mask is not None and attn_mask.requires_grad)
    attn_mask = _added(attn_mask, query.dtype)
    result: tuple[torch.Tensor, ...]
    if needs_scores:
        result = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    else:
        result = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )
    return result[0]


def _in_autocast(
    device: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: _Mask
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, _Mask]:
    """Cast the arguments as autocast does on this device; a bool mask stays as it is.

    The last comes first: so GCC evaluates what autocast_mode.h, cached_cast, gives to a function.
    """
    dtype = torch.get_autocast_dtype(device)
    if mask is not None and mask.dtype.is_floating_point:
        mask = mask.to(dtype)
    value, key, query = value.to(dtype), key.to(dtype), query.to(dtype)
    return query, key, value, mask


def _added(mask: _Mask, dtype: torch.dtype) -> _Mask:
    """Turn a bool mask into numbers to add: attention.cpp, convert_boolean_attn_mask."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    nothing = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, nothing, torch.full_like(nothing, -math.inf))


def _aligned(mask: _Mask, shape: tuple[int, ...]) -> _Mask:
    """Expand a mask, copied if its rows do not begin at multiples of 8 elements: attention.cpp.

    Its preprocess_mask and pad_bias, which adds 8 where nothing is missing.
    """
    if mask is None:
        return None
    *of_rows, of_elements = mask.stride()
    if of_elements != 1 or any(stride % _MASK_ALIGNMENT for stride in of_rows):
        length = mask.shape[-1]
        missing = _MASK_ALIGNMENT - length % _MASK_ALIGNMENT
        mask = functional.pad(mask, (0, missing))[..., :length]
    return mask.expand(*shape)
