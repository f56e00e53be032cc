"""Tell what a run would have needed of torch with a remedy, by the numbers of its record."""

from collections.abc import Callable, Mapping

from trainer_plugins import advice
from trainer_plugins.advice import Advice
from trainer_plugins.explain.run.case import Case

_TWO_BYTES = ("bfloat16", "float16")


def _at_the_error(case: Case) -> int | None:
    """Return what was there and what was asked for; None if the error does not say."""
    return case.live + case.asked if case.asked and case.total else None


def _less(freed: Callable[[Case], int]) -> Callable[[Case], int | None]:
    def needed(case: Case) -> int | None:
        whole, less = _at_the_error(case), freed(case)
        return whole - less if whole is not None and less else None

    return needed


def _risen(case: Case) -> int:
    steps = case.live_after_steps
    return steps[-1][1] - steps[0][1] if steps else 0


def _as_in_steps(case: Case) -> int | None:
    """Return the most that its steps needed: a save takes no more if it copies nothing there."""
    return max(case.highest_peak, case.fixed) if case.highest_peak and case.total else None


def _without_the_checkpoint(case: Case) -> int | None:
    """Return weights, gradients and states; the batch of a run that had no step is not known."""
    return case.fixed + case.to_come if case.fixed and case.total else None


def _in_one_piece(case: Case) -> int | None:
    whole = _at_the_error(case)
    return None if whole is None else max(whole, case.highest_peak)


NEEDED_WITH: Mapping[Advice, Callable[[Case], int | None]] = {
    advice.KEEP_NUMBERS: _less(_risen),
    advice.COPY_IN_MAIN_MEMORY: _as_in_steps,
    advice.LOAD_INTO_MAIN_MEMORY: _without_the_checkpoint,
    advice.END_PROCESS: _less(lambda case: case.foreign),
    advice.EXPANDABLE_SEGMENTS: _in_one_piece,
    advice.SECOND_MODEL_IN_16_BITS: _less(
        lambda case: sum(each.num_bytes for each in case.second_models[:1]) // 2
    ),
    advice.OUTPUTS_TO_MAIN_MEMORY: _less(lambda case: case.kept_logits),
}


def cache_that_fits(case: Case, rows: int) -> tuple[int, int]:
    """Return the rows, halved until the cache of their answers fits, and what they need then.

    The bytes are 0 if the config does not say how large the cache is.
    """
    heads = case.config("num_key_value_heads") or case.config("num_attention_heads")
    layers, length = case.config("num_hidden_layers"), case.argument("generation_max_length", 0)
    width = case.config("head_dim")
    if not width and case.config("num_attention_heads"):
        width = case.config("hidden_size") // case.config("num_attention_heads")
    num_bytes = 2 if case.record.run.dtype.rpartition(".")[2] in _TWO_BYTES else 4
    beams = max(1, case.argument("generation_num_beams", 1))
    a_row = 2 * layers * heads * width * length * num_bytes * beams
    if not a_row or not case.total:
        return rows // 2, 0
    rows //= 2
    while rows > 1 and _with_cache(case, rows * a_row, layers) > case.room:
        rows //= 2
    return rows, _with_cache(case, rows * a_row, layers)


def _with_cache(case: Case, cache: int, layers: int) -> int:
    """Return what is needed with a full cache: each token joins a layer's keys to a new tensor."""
    return case.fixed + cache + cache // (2 * layers)
