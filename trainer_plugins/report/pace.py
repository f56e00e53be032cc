"""Measure the time of a step, and the tokens or rows per second: the price of a remedy."""

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from statistics import median
from typing import NamedTuple

from trainer_plugins.record.timeline import Entry, Sample

_FEWEST = 3


class StepTimes(NamedTuple):
    """Holds the time of consecutive steps, without the evaluations and saves between them."""

    ended_seconds: float  # since the Unix epoch
    last_step: int
    num_steps: int
    busy_seconds: float
    num_tokens: int  # on all ranks; 0 if not counted

    @property
    def mean_seconds(self) -> float:
        return self.busy_seconds / self.num_steps


def paces_of(entries: Iterable[Entry]) -> Iterator[StepTimes]:
    """Yield the steps of one rank: each lasts from the reading before it."""
    before: Sample | None = None
    for entry in entries:
        if not isinstance(entry, Sample) or entry.moment == "generate":
            continue  # a generation is part of the step, or of the evaluation, that follows it
        if entry.moment == "train" and before is not None:
            seconds, num = entry.time_seconds - before.time_seconds, entry.step - before.step
            if seconds > 0 and num > 0:
                num_tokens = max(0, entry.num_tokens_seen - before.num_tokens_seen)
                yield StepTimes(entry.time_seconds, entry.step, num, seconds, num_tokens)
        before = entry


def describe_pace(found: Sequence[StepTimes], num_rows_a_step: int = 0) -> str:
    """Describe steps in one line; empty if fewer than three were read.

    Args:
        found: the steps of one rank.
        num_rows_a_step: the rows of all ranks, counted if tokens are not; 0 if unknown.
    """
    if len(found) < _FEWEST:
        return ""
    slowest = max(found, key=attrgetter("mean_seconds"))
    usual, longest = (
        seconds_text(each)
        for each in (median(each.mean_seconds for each in found), slowest.mean_seconds)
    )
    line = f"A step took {usual}, and at most {longest}, in step {slowest.last_step}"
    num_tokens = sum(each.num_tokens for each in found)
    num_rows = num_rows_a_step * sum(each.num_steps for each in found)
    if not num_tokens and not num_rows:
        return line
    rate = (num_tokens or num_rows) / sum(each.busy_seconds for each in found)
    text = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
    return f"{line}; {text} {'tokens' if num_tokens else 'rows'} a second on all ranks"


def seconds_text(seconds: float) -> str:
    """Render a duration for people.

    >>> seconds_text(0.0321), seconds_text(4.2), seconds_text(75), seconds_text(9000)
    ('32 ms', '4.2 s', '75 s', '2.5 h')
    """
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
