"""Samples: choose rows of a micro-batch, and two parts of them that should add up to the whole."""

from dataclasses import dataclass
from itertools import pairwise

from trainer_plugins.survival.exact.layouts import Inputs, Layout
from trainer_plugins.survival.exact.shares import Weight

_SHORT = (4, 3, 2)
"""How many examples short samples have, in the order of trying."""


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


def real(layout: Layout, inputs: Inputs, num_fit: int, weights: list[Weight]) -> list[Sample]:
    """Divide examples as they are into halves: as many as fit, and fewer.

    The examples are chosen so that the weights differ most.
    """
    total, samples = layout.count(inputs), []
    num = min(max(2, num_fit), total)
    while num >= 2:
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


def _spread(sample: Sample, weights: list[Weight]) -> float:
    """Return the distance between the two weights that are closest."""
    factors = sorted(sample.factors(weight)[0] for weight in weights)
    return min(more - less for less, more in pairwise(factors))


def idle(layout: Layout, inputs: Inputs) -> Sample:
    """Return a sample for a rank with fewer than two examples, which joins in others' passes."""
    lent = layout.probe(inputs, 1)
    return Sample(lent, (dict(lent), dict(lent)), (1, 1), "rows of another rank")


def short(layout: Layout, inputs: Inputs) -> list[Sample]:
    """Divide a few short examples, labelled so that weights differ: the first, and the others."""
    samples = []
    for num in (num for num in _SHORT if num <= layout.count(inputs)):
        whole = layout.probe(inputs, num)
        parts = (layout.take(whole, 0, 1), layout.take(whole, 1, num))
        words = f"{num} of its {layout.unit}, cut short where they can be, against 1 + {num - 1}"
        samples.append(Sample(whole, parts, (1, num - 1), words))
    return samples
