"""Judge the training rows by a bounded sample of them."""

from collections.abc import Sequence

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.check.facts import Check, CheckLine, DataFacts, Facts
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.units import percent

_WASTED = 0.5
_OUTLIER = 2.0  # multiple of the 99th percentile; the longest row of transformers#11388 had 4
_FEWEST = 100  # fewer rows have no meaningful percentiles


def lengths(facts: Facts) -> CheckLine | None:
    """Judge how unequal the rows are: padding, and outliers that may not fit."""
    data = facts.data
    if data.unseen:
        finding = Finding(
            code="data-not-seen",
            severity=Severity.INFO,
            summary="lengths, padding and the worst batch are unknown before training",
            evidence=data.unseen,
            remedy="Give max_length to the tokenizer, so that the longest row is known",
        )
        return CheckLine("rows", f"not sampled: {data.unseen}", (finding,))
    if not data.lengths:
        return None
    ordered = sorted(data.lengths)
    seen = f"{ordered[len(ordered) // 2]:,} tokens, the longest {ordered[-1]:,}"
    if _are_grouped(facts):
        # transformers/trainer_pt_utils.py, get_length_grouped_indices
        seen += ", which the first batch has"
    found = (_outlier(ordered, data), _padding(facts, data), _judge_early_padding(data))
    return CheckLine("rows", seen, tuple(filter(None, found)))


def collator(facts: Facts) -> CheckLine | None:
    """Judge whether the collator can make a batch of the longest sampled rows."""
    if not facts.data.collator_error:
        return None
    finding = Finding.warning(
        code="collator-fails",
        summary="the collator raises for the longest sampled rows",
        evidence=facts.data.collator_error,
        remedy="Run trainer.data_collator on rows of your data set: an error ends the run",
    )
    return CheckLine("collator", "", (finding,))


CHECKS: tuple[Check, ...] = (lengths, collator)


def measure_waste(lengths: Sequence[int], rows: int) -> float:
    """Return the fraction of padding in random batches, each padded to its longest row."""
    ordered, num = sorted(lengths), len(lengths)
    expected, below = 0.0, 0.0
    for rank, length in enumerate(ordered, start=1):
        chance = (rank / num) ** rows  # all rows of a batch are among these shortest
        expected, below = expected + length * (chance - below), chance
    return 1 - sum(ordered) / num / expected if expected else 0.0


def _outlier(ordered: Sequence[int], data: DataFacts) -> Finding | None:
    num = len(ordered)
    longest, usual = ordered[-1], ordered[int(0.99 * (num - 1))]
    if num < _FEWEST or longest <= _OUTLIER * usual:
        return None
    return Finding.warning(
        code="length-outliers",
        summary=f"few rows decide the peak: one has {longest:,} tokens, 99% at most {usual:,}",
        evidence=f"{num:,} rows of {data.num_rows or num:,} sampled",
        remedy="Cut or drop long rows (max_length), or survive_oom, which starts with the longest",
        amount=longest / usual,
        data={"longest_tokens": longest, "usual_tokens": usual, "num_sampled": num},
    )


def _padding(facts: Facts, data: DataFacts) -> Finding | None:
    is_balanced = facts.run.values.get("train_sampling_strategy") == "batch_rebalance"
    if data.is_packed or is_balanced or _are_grouped(facts) or len(data.lengths) < _FEWEST:
        return None
    rows = facts.run.rows
    part = measure_waste(data.lengths, rows)
    if part < _WASTED:
        return None
    return Finding.warning(
        code="padding-waste",
        summary=f"{percent(part)} of the tokens in a batch of {rows} random rows are padding",
        evidence=f"{len(data.lengths):,} rows sampled",
        remedy=f"{advice.GROUP_BY_LENGTH.flag(Door.TRAINER)} (transformers 4:"
        " --group_by_length), or packing",
        amount=part,
        data={"padding_fraction": part, "num_rows": rows, "num_sampled": len(data.lengths)},
    )


def _are_grouped(facts: Facts) -> bool:
    strategy = facts.run.values.get("train_sampling_strategy")
    return strategy == "group_by_length" or facts.run.flag("group_by_length")


def _judge_early_padding(data: DataFacts) -> Finding | None:
    if not data.pads_in_rows:
        return None
    part = data.pads_in_rows / (data.pads_in_rows + sum(data.lengths))
    if part < _WASTED:
        return None
    return Finding.warning(
        code="padding-in-rows",
        summary=f"{percent(part)} of the tokens in the data set are already padding",
        evidence=f"by the attention_mask of {len(data.lengths):,} rows",
        remedy="Tokenize without padding='max_length': the collator pads each batch to its longest",
        amount=part,
        data={"padding_fraction": part, "num_sampled": len(data.lengths)},
    )
