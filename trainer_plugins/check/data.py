"""Judges the rows that are trained on, by a bounded sample of them."""

from collections.abc import Callable, Sequence

from trainer_plugins.check.facts import Facts, Line
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.units import percent

_WASTED = 0.5
_OUTLIER = 2.0
"""How much longer than the 99th percentile the longest row may be: 4 times was a run's end in
transformers#11388."""

_FEWEST = 100
"""Fewer rows have no percentiles worth a word."""


def lengths(facts: Facts) -> Line | None:
    """Judge how unequal the rows are: padding, and the one that does not fit."""
    data = facts.data
    if data is None:
        return None
    if data.unseen:
        return Line("rows", f"not looked at: {data.unseen}", (_unseen(data.unseen),))
    if not data.lengths:
        return None
    ordered = sorted(data.lengths)
    longest, typical = ordered[-1], ordered[len(ordered) // 2]
    seen = f"{typical:,} tokens, the longest {longest:,}"
    if _are_grouped(facts):
        # transformers/trainer_pt_utils.py, get_length_grouped_indices
        seen += ", which the first batch has"
    found = [_outlier(ordered, facts), _padding(facts), _padded_before(facts)]
    return Line("rows", seen, tuple(filter(None, found)))


def collator(facts: Facts) -> Line | None:
    """Judge whether the longest rows that were seen make a batch."""
    data = facts.data
    if data is None or not data.collator_error:
        return None
    finding = Finding(
        code="collator-fails",
        severity=Severity.WARNING,
        summary="the collator raises for the longest rows that were looked at",
        evidence=data.collator_error,
        remedy="Run trainer.data_collator on rows of your data set; a worker that meets them ends"
        " the run",
    )
    return Line("collator", "", (finding,))


CHECKS: tuple[Callable[[Facts], Line | None], ...] = (lengths, collator)


def wasted(lengths: Sequence[int], rows: int) -> float:
    """Return the fraction of padding, if batches are drawn at random and padded to their longest.

    With chance `(k/n)**rows` all rows of a batch are among the k shortest of n.
    """
    ordered, num = sorted(lengths), len(lengths)
    expected, below = 0.0, 0.0
    for rank, length in enumerate(ordered, start=1):
        chance = (rank / num) ** rows
        expected, below = expected + length * (chance - below), chance
    return 1 - sum(ordered) / num / expected if expected else 0.0


def _unseen(why: str) -> Finding:
    return Finding(
        code="data-not-seen",
        severity=Severity.INFO,
        summary="lengths, padding and the worst batch are not known before training",
        evidence=why,
        remedy="Give max_length to the tokenizer: then the longest row is known",
    )


def _outlier(ordered: Sequence[int], facts: Facts) -> Finding | None:
    if len(ordered) < _FEWEST:
        return None
    longest, usual = ordered[-1], ordered[int(0.99 * (len(ordered) - 1))]
    if longest <= _OUTLIER * usual:
        return None
    total = "" if facts.data is None else f" of {facts.data.num_rows or len(ordered):,}"
    return Finding(
        code="length-outliers",
        severity=Severity.WARNING,
        summary=f"the longest row has {longest:,} tokens, and 99% have {usual:,} or fewer: memory"
        " is decided by a few rows, at a step nobody knows",
        evidence=f"{len(ordered):,} rows{total} looked at",
        remedy="Cut or drop rows above a length (max_length), or survive_oom, which computes the"
        " longest first",
        amount=longest / usual,
    )


def _padding(facts: Facts) -> Finding | None:
    if facts.data is None or facts.run is None or facts.data.is_packed:
        return None
    rows = facts.run.number("per_device_train_batch_size", 8)
    if _are_grouped(facts) or facts.run.values.get("train_sampling_strategy") == "batch_rebalance":
        return None
    part = wasted(facts.data.lengths, rows)
    if part < _WASTED or len(facts.data.lengths) < _FEWEST:
        return None
    return Finding(
        code="padding-waste",
        severity=Severity.WARNING,
        summary=f"{percent(part)} of what a batch of {rows} random rows computes is padding",
        evidence=f"{len(facts.data.lengths):,} rows looked at",
        remedy="--train_sampling_strategy group_by_length (transformers 4: --group_by_length), or"
        " packing",
        amount=part,
    )


def _are_grouped(facts: Facts) -> bool:
    run = facts.run
    return run is not None and (
        run.values.get("train_sampling_strategy") == "group_by_length"
        or run.flag("group_by_length")
    )


def _padded_before(facts: Facts) -> Finding | None:
    data = facts.data
    if data is None or not data.pads_in_rows:
        return None
    part = data.pads_in_rows / (data.pads_in_rows + sum(data.lengths))
    if part < _WASTED:
        return None
    return Finding(
        code="padding-in-rows",
        severity=Severity.WARNING,
        summary=f"{percent(part)} of the tokens in the data set are padding already",
        evidence=f"by the attention_mask of {len(data.lengths):,} rows",
        remedy="Tokenize without padding='max_length': the collator pads each batch to its longest",
        amount=part,
    )
