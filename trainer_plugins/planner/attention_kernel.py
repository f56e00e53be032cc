"""attention_kernel: the kernel that torch takes for attention on a card."""

from typing import Literal

Kernel = Literal["cuDNN", "flash", "memory-efficient", "all scores"]

_MAX_HEAD = 256  # of flash and of cuDNN
_AMPERE = (8, 0)


def prefers_cudnn(torch_version: str, capability: tuple[int, int]) -> bool:
    """Return whether attention asks cuDNN first (sdp_utils.cpp, check_prefer_cudnn_attention).

    It needs cuDNN 9.15.1, which comes with CUDA 13: with the builds that PyPI has since torch 2.11.
    """
    number, _, build = torch_version.partition("+")
    is_new = [int(part) for part in number.split(".")[:2]] >= [2, 11]
    return is_new and capability[0] in (9, 10) and not build.startswith("cu12")


def attention_kernel(
    dtype: str,
    head_size: int,
    value_size: int,
    capability: tuple[int, int],
    has_mask: bool,
    has_groups: bool = False,
    asks_cudnn: bool = False,
) -> Kernel:
    """Return the kernel that `scaled_dot_product_attention` takes on a card (sdp_utils.cpp).

    Flash and cuDNN can share keys among groups of heads, the memory-efficient kernel cannot.
    """
    is_half = dtype in ("float16", "bfloat16")
    sizes = (head_size, value_size)
    if asks_cudnn and is_half and max(sizes) <= _MAX_HEAD and not any(each % 8 for each in sizes):
        return "cuDNN"
    fits_flash = is_half and value_size == head_size <= _MAX_HEAD
    if fits_flash and capability >= _AMPERE and not has_mask:
        return "flash"
    has_kernel = dtype != "float64" and (dtype != "bfloat16" or capability >= _AMPERE)
    if has_kernel and head_size % (8 if is_half else 4) == 0 and not has_groups:
        return "memory-efficient"
    return "all scores"
