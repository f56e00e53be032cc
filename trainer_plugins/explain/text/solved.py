"""Identify the tensor of a model that has the size of the failed request, as an equation.

For a tensor of 10 MiB or more torch asks the driver for a multiple of 2 MiB (kMinLargeAlloc and
kRoundLarge of CUDACachingAllocator), and prints that with two digits after the point.
"""

from itertools import product
from math import ceil, floor, isqrt

from trainer_plugins.explain.shared import Said
from trainer_plugins.explain.text.text_facts import TextFacts
from trainer_plugins.planner.public_models import USUAL_VOCABULARIES, vocabularies_of
from trainer_plugins.units import GIB, MIB

_DTYPES = {4: "float32", 2: "16 bits"}  # by the bytes of a number
_USUAL_HEADS = (8, 16, 32)
_ROUND_LENGTH = 64
_SAVED_TOKENS = 1024
_LEAST_BYTES, _ROUNDED_BYTES = 10 * MIB, 2 * MIB
_SELDOM = 64  # by chance, one in 64 sizes gives as round a number of units


def solve_logits(facts: TextFacts) -> Said | str:
    """State the refused logits; empty if no vocabulary gives a plausible number."""
    model = facts.model
    found = [
        (tokens, words, width)
        for words, width in product(_list_vocabularies(facts), _DTYPES)
        if (tokens := _count_tokens(facts, words * width)) is not None
    ]
    if len({words for _, words, _ in found}) != 1:
        return ""
    (tokens, words, width), *others = found
    of = f" of {model.name}" if model else ""
    other = "".join(f" (or {each[0]:,} tokens in {_DTYPES[each[2]]})" for each in others)
    return facts.states(
        f"{{requested_bytes}} = {{num_tokens:,}} tokens x {{num_words:,}} words x {width}"
        f" bytes: logits{of} in {_DTYPES[width]}{other}. {_SAVED_TOKENS:,} tokens fewer save"
        f" {{saved_bytes}}.",
        num_tokens=tokens,
        num_words=words,
        saved_bytes=_SAVED_TOKENS * words * width,
    )


def count_logits(facts: TextFacts) -> Said | str:
    """State how many tokens the logits would have with each vocabulary; empty if none is known."""
    asked, vocabularies = facts.asked_bytes, _list_vocabularies(facts)
    if not asked or not vocabularies:
        return ""
    counts = " or ".join(f"{asked // (4 * one):,} tokens of {one:,} words" for one in vocabularies)
    return facts.states("{requested_bytes} are logits in fp32 of {counts}.", counts=counts)


def _list_vocabularies(facts: TextFacts) -> tuple[int, ...]:
    """Return the vocabulary that the text shows, by a number or a model, else the likely ones."""
    if given := facts.settings.count("vocab_size"):
        return (given,)
    if facts.model is not None:
        return (facts.model.vocabulary,)
    module = facts.find_call(r"modeling_\w+\.py")
    return USUAL_VOCABULARIES if module is None else vocabularies_of(module.file)


def _count_tokens(facts: TextFacts, token_bytes: int) -> int | None:
    """Count tokens: from the rows and the length in the text, else a round number."""
    asked, length = facts.asked_bytes or 0, facts.settings.length
    if length is None:
        return count_units(asked, token_bytes)
    rows = facts.settings.rows or max(1, round(asked / (token_bytes * length)))
    return match_tokens(asked, token_bytes, rows, length)


def solve_scores(facts: TextFacts) -> Said:
    """State the length of a matrix of length x length."""
    asked, rows = facts.asked_bytes or 0, facts.settings.rows or 1
    heads = _USUAL_HEADS if facts.model is None else (facts.model.heads,)
    found = [
        (length, num_heads, width)
        for num_heads, width in product(heads, _DTYPES)
        if (length := isqrt(asked // (rows * num_heads * width)))
        and (length := round(length / _ROUND_LENGTH) * _ROUND_LENGTH)
        and is_size_of(asked, rows * num_heads * length * length * width)
    ]
    if len(found) == 1:
        length, num_heads, width = found[0]
        return facts.states(
            "{requested_bytes} = {num_rows} rows x {num_heads} heads x {num_tokens:,} x"
            f" {{num_tokens:,}} x {width} bytes: the scores of attention in {_DTYPES[width]}.",
            num_rows=rows,
            num_heads=num_heads,
            num_tokens=length,
        )
    lengths = ", ".join(f"{isqrt(asked // (2 * each)):,} with {each} heads" for each in heads)
    return facts.states(
        "{requested_bytes} in 2 bytes, for one row, match a length of {lengths}.", lengths=lengths
    )


def solve_gradients(facts: TextFacts) -> Said | str:
    """State how many float32 gradients have the size of the failed request."""
    if not facts.asked_bytes:
        return ""
    return facts.states(
        "{requested_bytes} = {billions} billion parameters x 4 bytes: their gradients in float32.",
        billions=f"{facts.asked_bytes / 4e9:.2f}",
    )


def solve_weights(facts: TextFacts) -> Said | str:
    """State which matrix of the text's model has this size; empty if none has."""
    if (model := facts.model) is None:
        return ""
    kinds = {"embedding, or the head": model.vocabulary, "matrix of an MLP": model.intermediate}
    for (what, height), width in product(kinds.items(), _DTYPES):
        if is_size_of(facts.asked_bytes or 0, height * model.hidden * width):
            return facts.states(
                f"{{requested_bytes}} = {{num_rows:,}} x {{num_columns:,}} x {width} bytes: one"
                f" {what} of {model.name} in {_DTYPES[width]}.",
                num_rows=height,
                num_columns=model.hidden,
            )
    return ""


def solve_activations(facts: TextFacts) -> Said | str:
    """State which activations of an MLP or a norm have this size; empty if none do."""
    is_mlp = facts.find_call(r"mlp|(?:down|gate|up)_proj|act_fn|swiglu|silu|gelu", innermost=4)
    is_norm = facts.find_call(r"[Nn]orm\b", innermost=3)
    if not (is_mlp or is_norm) or (model := facts.model) is None:
        return ""
    what, columns = ("the MLP", model.intermediate) if is_mlp else ("the norm", model.hidden)
    for width in _DTYPES:
        if (tokens := _count_tokens(facts, columns * width)) is not None:
            return facts.states(
                f"{{requested_bytes}} = {{num_tokens:,}} tokens x {{num_columns:,}} x {width}"
                f" bytes: {what} of one layer of {model.name} in {_DTYPES[width]}.",
                num_tokens=tokens,
                num_columns=columns,
            )
    return ""


def is_size_of(asked_bytes: int, num_bytes: int) -> bool:
    """Return whether the failed request may be a tensor of this size.

    >>> is_size_of(int(3.91 * GIB), 8192 * 128_256 * 4), is_size_of(int(3.91 * GIB), 4 * GIB)
    (True, False)
    """
    digits = _digits(asked_bytes)
    is_as_large = -digits <= asked_bytes - num_bytes < _ROUNDED_BYTES + digits
    return num_bytes >= _LEAST_BYTES and is_as_large


def match_tokens(asked_bytes: int, token_bytes: int, rows: int, length: int) -> int | None:
    """Return the tokens of a batch whose tensor the failed request may be; None if it was another.

    A loss drops the first token of each row.
    """
    likely = (rows * length, rows * (length - 1))
    return next((each for each in likely if is_size_of(asked_bytes, each * token_bytes)), None)


def count_units(asked_bytes: int, unit_bytes: int) -> int | None:
    """Return the number of units, such as tokens, in the failed request, if suspiciously round.

    >>> count_units(int(3.91 * GIB), 128_256 * 4), count_units(int(3.91 * GIB), 152_064 * 4)
    (8192, None)
    """
    digits = _digits(asked_bytes)
    most = floor((asked_bytes + digits) / unit_bytes)
    least = ceil((asked_bytes - digits - _ROUNDED_BYTES) / unit_bytes)
    if asked_bytes < _LEAST_BYTES or most < max(1, least):
        return None
    power = 1 << most.bit_length()
    while most // power * power < least:
        power //= 2
    return most // power * power if power >= _SELDOM * (most - least + 1) else None


def _digits(asked_bytes: int) -> float:
    return 0.005 * (GIB if asked_bytes >= GIB else MIB)
