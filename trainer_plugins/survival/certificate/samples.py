"""Samples: chooses rows of a micro-batch, with two parts that should add up to the whole."""

import math
from collections.abc import Set
from itertools import pairwise
from typing import NamedTuple

import torch

from trainer_plugins.survival.exact.layouts import Layout, Rows
from trainer_plugins.survival.exact.shares import IGNORED, Inputs, Weight

SHORT = (4, 3, 2)  # sizes of short samples, in examples, in the order of trying

_MOST_CLASSES = 64  # with more labels than this, they are tokens, not classes


class Probe(NamedTuple):
    """Some examples, and the two parts that they are divided into."""

    whole: Inputs
    parts: tuple[Inputs, Inputs]
    nums: tuple[int, int]
    words: str  # description, such as "4 of its rows (2 + 2)"

    @property
    def num(self) -> int:
        return sum(self.nums)

    def factors(self, weight: Weight) -> list[float]:
        return [*map(weight.shares_of(self.whole, self.num), self.parts, self.nums)]


class Measurement(NamedTuple):
    """The result of measuring one sample."""

    sample: Probe
    errors: dict[Weight, float]  # by weight, on the rank where parts are farthest from the whole
    tolerance: float
    how: str  # the conditions: "in training mode"
    is_gradient: bool

    @property
    def words(self) -> str:
        return f"{self.sample.words}, {self.how}"

    @property
    def is_additive(self) -> bool:
        return min(self.errors.values()) <= self.tolerance

    def fits(self, weight: Weight) -> bool:
        return self.errors[weight] <= self.tolerance


def _divide(layout: Layout, whole: Inputs, first: int, num: int, words: str) -> Probe:
    parts = (layout.take(whole, 0, first), layout.take(whole, first, num))
    return Probe(whole, parts, (first, num - first), f"{words} ({first} + {num - first})")


def _halves(layout: Layout, whole: Inputs, num: int) -> Probe:
    return _divide(layout, whole, num // 2, num, f"{num} of its {layout.unit}")


def real(
    layout: Layout,
    inputs: Inputs,
    num_fit: int,
    weights: tuple[Weight, ...],
    *,
    varies_labels: bool = False,
) -> list[Probe]:
    """Halve as many examples as fit, and fewer, where the weights, or the labels, differ most."""
    total = layout.count(inputs)
    order = _order_by_label(layout, inputs) if varies_labels else []
    samples, num = [], min(max(2, num_fit), total)
    while num >= 2:
        if order and isinstance(layout, Rows):
            ends = order[: num // 2] + order[num // 2 - num :]
            samples.append(_halves(layout, layout.pick(inputs, ends), num))
        else:
            starts = range(0, total - num + 1, max(1, (total - num) // 8))
            choices = starts[:1] if len(weights) == 1 else starts
            cut = [
                _halves(layout, layout.take(inputs, start, start + num), num) for start in choices
            ]
            samples.append(max(cut, key=lambda one: _spread(one, weights)) if cut[1:] else cut[0])
        num //= 2
    return samples


def _order_by_label(layout: Layout, inputs: Inputs) -> list[int]:
    """Order rows by the mean of their labels; empty if all are equal, or all in one row."""
    labels = inputs.get("labels")
    if not (isinstance(layout, Rows) and torch.is_tensor(labels) and labels.dim()):
        return []
    counted = labels.cpu().reshape(len(labels), -1).double()
    means = counted.masked_fill(counted == IGNORED, math.nan).nanmean(1).nan_to_num()
    if not bool((means != means[0]).any()):
        return []
    order: list[int] = means.argsort(stable=True).tolist()
    return order


def classes(inputs: Inputs, known: Set[int] = frozenset()) -> frozenset[int]:
    """Return the labels of a micro-batch; empty if they are not integers, or too many."""
    labels = inputs.get("labels")
    if not torch.is_tensor(labels) or labels.is_floating_point():
        return frozenset()
    there = frozenset(labels.flatten().tolist()) - {IGNORED}
    # A micro-batch of short answers has few tokens: only those of all micro-batches are many.
    num = len(there if labels.dim() == 1 else there | known)
    return there if num <= _MOST_CLASSES else frozenset()


def labels_of_rows(inputs: Inputs) -> frozenset[int]:
    """Return the classes of a micro-batch, if each row has one label."""
    labels = inputs.get("labels")
    return classes(inputs) if torch.is_tensor(labels) and labels.dim() == 1 else frozenset()


def pair_classes(layout: Layout, inputs: Inputs, new: frozenset[int]) -> list[Probe]:
    """Pair, for each of these classes, the rows with the largest and smallest share of it."""
    samples: list[Probe] = []
    if not isinstance(layout, Rows):
        return samples
    for one in sorted(new):
        labels = inputs["labels"].cpu().reshape(len(inputs["labels"]), -1)
        parts_of_rows = (labels == one).sum(1) / (labels != IGNORED).sum(1).clamp(min=1)
        rows = [int(parts_of_rows.argmin()), int(parts_of_rows.argmax())]
        if parts_of_rows[rows[0]] < parts_of_rows[rows[1]]:
            sample = _halves(layout, layout.pick(inputs, rows), 2)
            words = f"2 of its rows, one with the label {one} and one without (1 + 1)"
            samples.append(sample._replace(words=words))
    return samples


def _spread(sample: Probe, weights: tuple[Weight, ...]) -> float:
    factors = sorted(sample.factors(weight)[0] for weight in weights)
    return min((more - less for less, more in pairwise(factors)), default=0.0)


def idle(layout: Layout, inputs: Inputs) -> Probe:
    """Return a sample for a rank with fewer than two examples, which only joins others' passes."""
    lent = layout.probe(inputs, 1)
    return Probe(lent, (dict(lent), dict(lent)), (1, 1), "rows of another rank")


def all_rows(layout: Layout, inputs: Inputs) -> Probe:
    """Divide all examples, cut short where possible: some couplings start at a certain number."""
    num = layout.count(inputs)
    words = f"all {num} of its {layout.unit}, cut short"
    return _divide(layout, layout.probe(inputs, num), num // 2, num, words)


def short(layout: Layout, inputs: Inputs) -> list[Probe]:
    """Divide a few short examples, labelled so that weights differ: the first, and the others."""
    total = layout.count(inputs)
    return [
        _divide(layout, layout.probe(inputs, num), 1, num, f"{num} of its {layout.unit}, cut short")
        for num in SHORT
        if num <= total
    ]
