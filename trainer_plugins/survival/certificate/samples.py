"""Samples: choose rows of a micro-batch, and two parts of them that should add up to the whole."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from trainer_plugins.survival.exact.layouts import Inputs, Layout, Rows
from trainer_plugins.survival.exact.shares import Weight
from trainer_plugins.survival.exact.shown import IGNORED

SHORT = (4, 3, 2)
"""How many examples short samples have, in the order of trying."""

_MOST_CLASSES = 64
"""Most labels of a micro-batch that are taken for classes, and not for tokens."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Holds some examples, and two parts that they are divided into."""

    whole: Inputs
    parts: tuple[Inputs, Inputs]
    nums: tuple[int, int]
    words: str
    """Description of the sample, as in "4 of its rows against 2 + 2"."""

    def factors(self, weight: Weight) -> list[float]:
        total = weight.of(self.whole, sum(self.nums))
        pairs = zip(self.parts, self.nums, strict=True)
        return [weight.share(weight.of(part, num), total) for part, num in pairs]


def real(
    layout: Layout,
    inputs: Inputs,
    num_fit: int,
    weights: list[Weight],
    *,
    varies_labels: bool = False,
) -> list[Sample]:
    """Divide examples as they are into halves: as many as fit, and fewer.

    The examples are chosen so that the weights differ most.

    Args:
        layout: how the examples lie in `inputs`.
        inputs: a micro-batch.
        num_fit: how many of its examples are computed at once, at most.
        weights: those that come into question.
        varies_labels: whether the halves are to have other labels: a loss may be weighted by them.
    """
    total, samples = layout.count(inputs), []
    order = _by_label(layout, inputs) if varies_labels else []
    num = min(max(2, num_fit), total)
    while num >= 2:
        if order and isinstance(layout, Rows):
            ends = order[: num // 2] + order[num // 2 - num :]
            samples.append(_cut(layout, layout.pick(inputs, ends), 0, num))
            num //= 2
            continue
        starts = range(0, total - num + 1, max(1, (total - num) // 8))
        all_alike = len(weights) == 1 or len(starts) == 1
        choices = [
            _cut(layout, inputs, start, num) for start in (starts[:1] if all_alike else starts)
        ]
        samples.append(
            max(choices, key=lambda sample: _spread(sample, weights))
            if len(choices) > 1
            else choices[0]
        )
        num //= 2
    return samples


def _cut(layout: Layout, inputs: Inputs, start: int, num: int) -> Sample:
    whole, half = layout.take(inputs, start, start + num), num // 2
    parts = (layout.take(whole, 0, half), layout.take(whole, half, num))
    return Sample(
        whole,
        parts,
        (half, num - half),
        f"{num} of its {layout.unit} against {half} + {num - half}",
    )


def _by_label(layout: Layout, inputs: Inputs) -> list[int]:
    """Order rows by the mean of their labels; empty if all are alike, or lie in one row."""
    labels = inputs.get("labels")
    if not (isinstance(layout, Rows) and torch.is_tensor(labels) and labels.dim()):
        return []
    counted = labels.cpu().reshape(len(labels), -1).double()
    means = counted.masked_fill(counted == IGNORED, math.nan).nanmean(1).nan_to_num()
    order: list[int] = (
        means.argsort(stable=True).tolist() if bool((means != means[0]).any()) else []
    )
    return order


def classes(inputs: Inputs) -> frozenset[int]:
    """Return the labels of a micro-batch; empty if they are no integers, or too many for that."""
    labels = inputs.get("labels")
    if not torch.is_tensor(labels) or labels.is_floating_point():
        return frozenset()
    there = {*labels.flatten().tolist()} - {IGNORED}
    return frozenset(there if len(there) <= _MOST_CLASSES else ())


def of_classes(layout: Layout, inputs: Inputs, new: frozenset[int]) -> list[Sample]:
    """For each of these classes, set the row that has most of it beside the one that has least."""
    samples: list[Sample] = []
    if not isinstance(layout, Rows):
        return samples
    for one in sorted(new):
        labels = inputs["labels"].cpu().reshape(len(inputs["labels"]), -1)
        parts_of_rows = (labels == one).sum(1) / (labels != IGNORED).sum(1).clamp(min=1)
        rows = [int(parts_of_rows.argmin()), int(parts_of_rows.argmax())]
        if parts_of_rows[rows[0]] < parts_of_rows[rows[1]]:
            sample = _cut(layout, layout.pick(inputs, rows), 0, 2)
            words = f"2 of its rows, one with the label {one} and one with others, against 1 + 1"
            samples.append(replace(sample, words=words))
    return samples


def _spread(sample: Sample, weights: list[Weight]) -> float:
    """Return the distance between the two weights that are closest."""
    factors = sorted(sample.factors(weight)[0] for weight in weights)
    return min(more - less for less, more in pairwise(factors))


def idle(layout: Layout, inputs: Inputs) -> Sample:
    """Return a sample for a rank with fewer than two examples, which joins in others' passes."""
    lent = layout.probe(inputs, 1)
    return Sample(lent, (dict(lent), dict(lent)), (1, 1), "rows of another rank")


def all_rows(layout: Layout, inputs: Inputs) -> Sample:
    """Divide all examples, cut short where they can be: some couplings begin with so many."""
    num = layout.count(inputs)
    whole, half = layout.probe(inputs, num), num // 2
    parts = (layout.take(whole, 0, half), layout.take(whole, half, num))
    words = f"all {num} of its {layout.unit}, cut short where they can be"
    words += f", against {half} + {num - half}"
    return Sample(whole, parts, (half, num - half), words)


def short(layout: Layout, inputs: Inputs) -> list[Sample]:
    """Divide a few short examples, labelled so that weights differ: the first, and the others."""
    samples = []
    for num in (num for num in SHORT if num <= layout.count(inputs)):
        whole = layout.probe(inputs, num)
        parts = (layout.take(whole, 0, 1), layout.take(whole, 1, num))
        words = f"{num} of its {layout.unit}, cut short where they can be, against 1 + {num - 1}"
        samples.append(Sample(whole, parts, (1, num - 1), words))
    return samples
