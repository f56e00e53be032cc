"""Compute the torch memory of a run with a remedy, from the numbers of its record."""

from collections.abc import Callable, Mapping

from trainer_plugins import advice
from trainer_plugins.advice import Advice
from trainer_plugins.explain.run.case import Case

_TWO_BYTES = ("bfloat16", "float16")


def _subtract(freed: int, case: Case) -> int:
    """Return the live memory plus the request, less `freed`; 0 if unknown."""
    return case.live_bytes + case.asked_bytes - freed if case.asked_bytes and freed else 0


# 0 means unknown.
NEEDED_WITH: Mapping[Advice, Callable[[Case], int]] = {
    advice.KEEP_NUMBERS: lambda case: _subtract(case.risen_bytes, case),
    # The memory of its steps: a save takes no more if it copies nothing on the card.
    advice.COPY_IN_MAIN_MEMORY: lambda case: (
        max(case.highest_peak_bytes, case.fixed_bytes) if case.highest_peak_bytes else 0
    ),
    # Weights, gradients and states; the batch of a run without a step is unknown.
    advice.LOAD_INTO_MAIN_MEMORY: lambda case: (
        case.fixed_bytes + case.to_come_bytes if case.fixed_bytes else 0
    ),
    advice.END_PROCESS: lambda case: _subtract(case.foreign_bytes, case),
    advice.EXPANDABLE_SEGMENTS: lambda case: (
        max(case.live_bytes + case.asked_bytes, case.highest_peak_bytes) if case.asked_bytes else 0
    ),
    advice.SECOND_MODEL_IN_16_BITS: lambda case: _subtract(
        sum(each.num_bytes for each in case.second_models[:1]) // 2, case
    ),
    advice.OUTPUTS_TO_MAIN_MEMORY: lambda case: _subtract(case.kept_logits_bytes, case),
}


def cache_that_fits(case: Case, rows: int) -> tuple[int, int]:
    """Return the rows, halved until their answers' KV cache fits, and the memory with it.

    The bytes are 0 if the config does not determine the size of the cache.
    """
    heads = case.config("num_key_value_heads") or case.config("num_attention_heads")
    layers, length = case.config("num_hidden_layers"), case.argument("generation_max_length", 0)
    width = case.config("head_dim")
    if not width and case.config("num_attention_heads"):
        width = case.config("hidden_size") // case.config("num_attention_heads")
    num_bytes = 2 if case.record.run.dtype.rpartition(".")[2] in _TWO_BYTES else 4
    beams = max(1, case.argument("generation_num_beams", 1))
    a_row = 2 * layers * heads * width * length * num_bytes * beams
    if not a_row or not case.total_bytes:
        return rows // 2, 0
    rows //= 2
    while rows > 1 and _add_cache(case, rows * a_row, layers) > case.room_bytes:
        rows //= 2
    return rows, _add_cache(case, rows * a_row, layers)


def _add_cache(case: Case, cache: int, layers: int) -> int:
    """Return the memory with a full cache: each token copies a layer's keys to a new tensor."""
    return case.fixed_bytes + cache + cache // (2 * layers)
