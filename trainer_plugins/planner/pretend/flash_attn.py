"""Stand in for flash-attn 2.8.3: flash_attn_interface.py and csrc/flash_attn/flash_api.cpp."""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeAlias

import torch

from trainer_plugins.patched import Patches

_ROWS_OF_A_BLOCK = 128
_AMPERE = (8, 0)

_Gradients: TypeAlias = tuple[torch.Tensor | None, ...]


def stand_in(patches: Patches, capability: tuple[int, int], packed_sequences: int) -> None:
    """Let transformers find the package, and let its functions do what they do on a card."""
    from transformers import modeling_flash_attention_utils as module

    compatible = getattr(module, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", None)
    if compatible is None:  # transformers 4, where such plans are refused
        return
    for name, part in _package(capability).items():
        patches.set_item(sys.modules, name, part)
    for name in ("general_availability_check", "pkg_availability_check"):
        patches.set_item(compatible[2], name, lambda *_, **__: True)
    patches.set(module, "is_flash_attn_2_available", lambda *_, **__: True)
    patches.set(
        module, "_is_packed_sequence", lambda positions, rows: rows == 1 and packed_sequences > 0
    )
    patches.set(
        module,
        "prepare_fa_kwargs_from_position_ids",
        lambda positions: _as_packed(positions, packed_sequences),
    )
    patches.set(module, "_loaded_implementation", None)  # it may hold the functions of a package


def _as_packed(positions: torch.Tensor, num_sequences: int) -> tuple[tuple[Any, Any], ...]:
    """Return where sequences begin and the longest length, which transformers reads from values."""
    begins = positions.new_empty(num_sequences + 1, dtype=torch.int32)
    return (begins, begins), (positions.shape[-1], positions.shape[-1])


def _package(capability: tuple[int, int]) -> dict[str, ModuleType]:
    package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")

    def flash_attn_func(  # transformers reads the names of these arguments
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
    ) -> torch.Tensor:
        return _attended(capability, q, k, v, None)

    def flash_attn_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
    ) -> torch.Tensor:
        return _attended(capability, q, k, v, cu_seqlens_q)

    vars(package).update(
        __spec__=ModuleSpec("flash_attn", None, is_package=True),
        __version__="2.8.3",
        __path__=[],
        flash_attn_func=flash_attn_func,
        flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_with_kvcache=_not_planned,
        bert_padding=padding,
    )
    vars(padding).update(
        __spec__=ModuleSpec("flash_attn.bert_padding", None),
        pad_input=_pad_input,
        unpad_input=_not_planned,
    )
    return {"flash_attn": package, "flash_attn.bert_padding": padding}


def _pad_input(
    hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int
) -> torch.Tensor:
    padded: torch.Tensor = _Padded.apply(  # type: ignore[no-untyped-call]
        hidden_states, indices, batch * seqlen
    )
    return padded.view(batch, seqlen, *padded.shape[1:])


def _not_planned(*_: object, **__: object) -> torch.Tensor:
    raise NotImplementedError("flash-attn's unpadding of queries, or its paged cache")


def _attended(
    capability: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    begins: torch.Tensor | None,
) -> torch.Tensor:
    """Return the output of the kernel for a query of rows x length x heads x size.

    With `begins`, the places where sequences begin and the end, rows follow each other in one
    dimension. Keys may have fewer heads.
    """
    if capability < _AMPERE:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    attend: Callable[..., torch.Tensor] = _Attention.apply
    return attend(query, key, value, begins)


class _Attention(torch.autograd.Function):
    """Stands for FlashAttnFunc and FlashAttnVarlenFunc."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        begins: torch.Tensor | None,
    ) -> torch.Tensor:
        size = query.shape[-1]
        if missing := -size % 8:
            query, key, value = (
                torch.nn.functional.pad(each, [0, missing]) for each in (query, key, value)
            )
        output = torch.empty_like(query)
        tokens, heads = query.shape[:-2].numel(), query.shape[-2]
        sums = query.new_empty(tokens * heads, dtype=torch.float32)  # softmax_lse
        state = query.new_empty(2, dtype=torch.int64)  # rng_state
        ctx.save_for_backward(query, key, value, output, sums, state)
        ctx.begins = begins
        return output[..., :size]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> _Gradients:
        query, key, value, *_ = ctx.saved_tensors
        gradients = [torch.empty_like(each) for each in (query, key, value)]
        size = gradient.shape[-1]
        if missing := -size % 8:
            gradient = torch.nn.functional.pad(gradient, [0, missing])
        _run_backward(query, key, None if ctx.begins is None else len(ctx.begins) - 1)
        return *(each[..., :size] for each in gradients), None


def _run_backward(query: torch.Tensor, key: torch.Tensor, num_sequences: int | None) -> None:
    """Make what the kernel makes for itself: flash_api.cpp, mha_bwd and mha_varlen_bwd."""
    heads, size = query.shape[-2:]
    if num_sequences is None:
        blocks = -(-query.shape[1] // _ROWS_OF_A_BLOCK)
        rows = query.shape[0] * blocks * _ROWS_OF_A_BLOCK
    else:
        rows = query.shape[0] + _ROWS_OF_A_BLOCK * num_sequences
    columns = -(-size // 32) * 32 if size <= 128 else -(-size // 64) * 64
    made = [  # softmax_d and dq_accum
        query.new_empty(rows * heads, dtype=torch.float32),
        query.new_empty(rows * heads * columns, dtype=torch.float32),
    ]
    if key.shape[-2] != heads:  # dk_expanded and dv_expanded, which are summed up by group
        made += [key.new_empty(key.shape[:-2].numel() * heads * size) for _ in range(2)]
    del made


class _Padded(torch.autograd.Function):
    """Stands for IndexPutFirstAxis of flash_attn/bert_padding.py."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, indices: torch.Tensor, length: int) -> torch.Tensor:
        ctx.save_for_backward(indices)
        output = values.new_zeros(length, *values.shape[1:])
        output[indices] = values
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> _Gradients:
        (indices,) = ctx.saved_tensors
        return gradient[indices], None, None
