"""Tolerances that follow from the arithmetic: what rounding may do on any CPU, in whichever order it takes its sums.

Two runs of the same training on one machine are equal bit for bit as long as they do the same
operations on the same numbers. Where one takes a sum in another order (other ranks, pieces, an
optimizer that was loaded) rounding tells them apart, and the instruction set decides by how much:
it is the number of sums that it takes at once.

u is the unit roundoff, half the distance from 1 to the next number: 2**-24 in float32.
"""

import math
from collections.abc import Sequence

import torch

_STANDARD_DEVIATIONS = 5
"""Rounding errors go beyond five of them once in two million."""

INITIAL_WEIGHT = 0.02
"""Standard deviation of a fresh weight: `initializer_range` of transformers."""

_BETA2 = 0.999
"""Of AdamW in TrainingArguments."""


def terms_of(num_layers: int, width: int) -> int:
    """Count the terms that are added up, one after the other, on the way from the weights of a Llama to a gradient.

    Seven matrices a layer, forward and back, with no more terms to a number than the widest has
    columns.
    """
    return 2 * 7 * num_layers * width


def of_sums(num_terms: int, dtype: torch.dtype = torch.float32) -> float:
    """Bound how far two orders of so many terms are apart, as a fraction of the largest value.

    Errors of rounding have changing signs, so they add up as a random walk does: to sqrt(n) u,
    where the worst case would be n u (Higham and Mary, A New Approach to Probabilistic Rounding
    Error Analysis, SIAM J. Sci. Comput. 41, 2019). Both have errors, hence the 2.
    """
    return _STANDARD_DEVIATIONS * math.sqrt(2 * num_terms) * torch.finfo(dtype).eps / 2


def of_a_mean(num_terms: int, num_values: int) -> float:
    """Bound the same of a mean over so many values in float32, such as a loss over tokens."""
    return of_sums(num_terms) / math.sqrt(num_values) + torch.finfo(torch.float32).eps


def of_gradients(
    num_terms: int, learning_rates: Sequence[float], dtype: torch.dtype = torch.float32
) -> float:
    """Bound how far gradients are apart after AdamW took steps of these learning rates.

    By rounding itself, and by what rounding made of the weights, as a fraction of their size (see
    `after_adam`).
    """
    return (
        of_sums(num_terms, dtype)
        + sum(learning_rates) * _of_adam(num_terms, dtype) / INITIAL_WEIGHT
    )


def after_adam(
    ours: torch.Tensor,
    theirs: torch.Tensor,
    learning_rates: Sequence[float],
    num_terms: int,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Measure how far weights are apart that AdamW moved, as a fraction of what rounding may do in all.

    AdamW divides a gradient by its own size, and so moves a weight by the learning rate, whatever
    the gradient is. Of a weight whose gradient g is off by d, the update is off by lr d / |g|: for
    half of the weights less than lr d / s, twice (s, the standard deviation of gradients taken for
    normal; the median of |g| is 0.67 s). Where g itself is but rounding, its sign is chance, and
    the weight is off by up to 2 lr. So no bound on the largest difference says much; that on the
    median and on the square mean do.

    A loaded optimizer has an error of its own. DeepSpeedCPUAdam multiplies beta2^t step by step,
    and takes it by pow() after a load (IncrementStep, deepspeed/ops/csrc/includes/cpu_adam.h). They
    are t u apart, and the square root of 1 - beta2^t, about t (1 - beta2), by u / (2 (1 - beta2))
    of itself: by that every update is off. Last, each step rounds the weight to its own digits.
    """
    way, u = sum(learning_rates), torch.finfo(dtype).eps / 2
    moments = u / (2 * (1 - _BETA2))
    stored = len(learning_rates) * 2 * u * float(theirs.abs().max())
    off = (ours.double() - theirs.double()).abs()
    median = float(off.median()) / (way * (2 * of_sums(num_terms, dtype) + moments) + stored)
    square_mean = float(off.square().mean().sqrt()) / (
        way * (_of_adam(num_terms, dtype) + moments) + stored
    )
    return max(median, square_mean)


def _of_adam(num_terms: int, dtype: torch.dtype) -> float:
    """The square mean of min(2, d / |g|), for gradients g that are normal with d = `of_sums` of their deviation s.

    The square has the mean 4 sqrt(2 / pi) d / s: twice the density at 0, sqrt(2 / pi) / s, from
    either branch.
    """
    return math.sqrt(4 * math.sqrt(2 / math.pi) * of_sums(num_terms, dtype))
