"""Comparison: compute a sample and its parts, and say how far apart they are."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import Trainer

from trainer_plugins.survival.attempt.attempt import DidNotFit, attempt
from trainer_plugins.survival.attempt.snapshot import Buffers
from trainer_plugins.survival.certificate.held import Drawers, held
from trainer_plugins.survival.certificate.rounding import rounded_anew
from trainer_plugins.survival.certificate.samples import Sample
from trainer_plugins.survival.exact.finality import Watch, without_reentry
from trainer_plugins.survival.exact.layouts import IndivisibleError, Inputs
from trainer_plugins.survival.exact.losses import Family
from trainer_plugins.survival.exact.shares import Weight
from trainer_plugins.survival.limit.limit import cells
from trainer_plugins.survival.ranks import Ranks

# More than rounding makes of a right weight, and less than a wrong one does. A loss is often taken
# in float32, whatever the model is in. Right weights are off by 1e-7 in float32 and 2e-3 in
# bfloat16, at 16 and 28 layers.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}
_TOLERANCE_TF32 = 5e-3
_TOLERANCE_LOW = 3e-2

_LEAST_FRACTION = 1e-2
"""Part of the largest gradient below which a parameter's gradient may be nothing but rounding."""

_OF_ROUNDING = 3.0
"""An error of so many times what rounding anew makes is rounding: right weights were up to 2.1."""

_NOT_A_NUMBER = 1e9
"""Error of a part whose gradient or loss is not finite."""

_SMALLEST_LOSS = 1e-2
"""A smaller loss may be nothing but rounding: terms cancel, as GRPO's do. The gradient decides."""

_FORWARD, _BOTH = 2 / 3, 2.0
"""Cost of a check in forward and backward passes over its sample: a backward takes two thirds."""

Loss = Callable[[Inputs], torch.Tensor]
_Measured = list[torch.Tensor]
"""One tensor a parameter or a reduction, or the loss alone."""


class Steady:
    """Lets each pass begin from the same state, so that passes can be compared."""

    def __init__(self, model: nn.Module, drawers: Drawers, put_back: Callable[[], object]) -> None:
        self._buffers, self.drawers, self._put_back = Buffers(model), drawers, put_back

    def begin(self, *, is_whole: bool) -> None:
        """Begin a pass.

        The second of two parts has the buffers that the first has left, as in training.
        """
        if is_whole:
            self._buffers.restore()
        self._put_back()
        self.drawers.begin()

    def restore(self) -> None:
        self._buffers.restore()


@contextmanager
def steady(model: nn.Module, put_back: Callable[[], object]) -> Iterator[Steady]:
    """Surround passes that can be compared."""
    with without_reentry(model), held(model) as drawers:
        steady = Steady(model, drawers, put_back)
        try:
            yield steady
        finally:
            steady.restore()


@dataclass(frozen=True, slots=True)
class Told:
    """Holds what a sample has shown."""

    sample: Sample
    errors: dict[Weight, float]
    """How far the parts are from the whole by each weight, on the rank where they are farthest."""
    tolerance: float
    words: str


class Comparison:
    """Compares samples with their parts, together with the ranks that measure with this one."""

    def __init__(
        self,
        trainer: Trainer,
        ranks: Ranks,
        family: Family,
        loss: Loss,
        parameters: list[nn.Parameter],
        watch: Watch,
        steady: Steady,
    ) -> None:
        self._trainer, self._ranks, self._family, self._loss = trainer, ranks, family, loss
        self._parameters, self._watch, self._steady = parameters, watch, steady
        self.why_untold = "it takes two examples to measure that they add up"
        self.cost = 0.0
        """Cells that were computed forward and backward."""
        self._is_gradient = True

    def first_that_tells(
        self, samples: list[Sample], idle: Sample, *, is_gradient: bool
    ) -> Told | None:
        """Measure the largest sample that fits and has something to measure.

        Returns:
            What it has shown; None, on every rank, if there is no such sample.
        """
        self._is_gradient = is_gradient
        for place in range(self._ranks.highest(len(samples))):
            sample = samples[min(place, len(samples) - 1)] if samples else idle
            if (told := self._told(sample, is_idle=not samples)) is not None:
                return told
        return None

    def said(self, told: Told) -> str:
        """Say that no weight fits, with the numbers, or that the same rows differ in each pass."""
        again = [self._passed(told.sample, (told.sample.whole,)) for _ in range(2)]
        if all(isinstance(one, list) for one in again):
            first, second = again
            noise = _error(first[0], [second[0]], [1.0])  # type: ignore[index]
            noise = self._ranks.highest(_whole(noise)) / 1e9
            if noise > told.tolerance:
                return (
                    f"two passes over the same {sum(told.sample.nums)} examples disagree by "
                    f"{noise:.1e}, with the drawing of random numbers held, so it cannot be "
                    "measured whether its parts add up"
                )
        if min(told.errors.values()) >= _NOT_A_NUMBER:
            return f"the {self._what} of a part is not a number: measured on {told.words}"
        tried = ", ".join(
            f"{'not a number' if error >= _NOT_A_NUMBER else f'{error:.1e}'} if it is {weight.name}"
            for weight, error in told.errors.items()
        )
        return (
            f"its {self._what} is not the sum of its parts': measured on {told.words}, it is off "
            f"by {tried}"
        )

    @property
    def _what(self) -> str:
        return "gradient" if self._is_gradient else "loss"

    def _told(self, sample: Sample, *, is_idle: bool) -> Told | None:
        measured = self._passed(sample, (sample.whole, *sample.parts))
        failed = isinstance(measured, DidNotFit)
        if self._ranks.highest(int(failed)):
            line = measured.first_line if isinstance(measured, DidNotFit) else "on another rank"
            self.why_untold = (
                f"there was no room to measure whether its loss can be divided ({line})"
            )
            return None
        assert not isinstance(measured, DidNotFit)
        self.cost += (_BOTH if self._is_gradient else _FORWARD) * cells(sample.whole)
        tells = not is_idle and self._tells(measured)
        if not self._ranks.highest(int(tells)):
            self.why_untold = (
                f"its {self._what} is 0, or not a number, on {sum(sample.nums)} examples, so it "
                "cannot be measured whether it is the sum of its parts'"
            )
            return None
        weights = self._family.weights
        errors = {
            w: _error(measured[0], measured[1:], sample.factors(w)) if tells else 0.0
            for w in weights
        }
        errors = {
            weight: self._ranks.highest(_whole(error)) / 1e9 for weight, error in errors.items()
        }
        told = Told(sample, errors, self._tolerance(), f"{sample.words}, {self._how()}")
        return None if self._is_rounding(told, measured[0], tells=tells) else told

    def _is_rounding(self, told: Told, whole: _Measured, *, tells: bool) -> bool:
        """Tell whether what no weight fits is nothing but rounding, so that the sample is no proof.

        The gradients of chosen and rejected answers that are alike cancel, for one.
        """
        least = min(told.errors.values())
        if not self._is_gradient or not told.tolerance < least < _NOT_A_NUMBER:
            return False
        with rounded_anew(self._ranks.bare):
            again = self._passed(told.sample, (told.sample.whole,))
        # Without room for that it is not known, and a smaller sample has to tell.
        noise = math.inf if isinstance(again, DidNotFit) else _error(whole, again, [1.0])
        noise = self._ranks.highest(_whole(noise) if tells else 0) / 1e9
        self.why_untold = (
            f"its {self._what} is nothing but rounding on {sum(told.sample.nums)} examples, so it "
            "cannot be measured whether it is the sum of its parts'"
        )
        return least <= _OF_ROUNDING * noise

    def _how(self) -> str:
        name = next((type(module).__name__ for module in self._steady.drawers.in_eval), "")
        mode = "in training mode" if self._ranks.bare.training else "in evaluation mode"
        return (
            f"{mode}, but {name}, which draws by numpy or Python, without its children"
            if name
            else mode
        )

    def _tells(self, measured: list[_Measured]) -> bool:
        sizes = [max(float(one.norm()) for one in some) for some in measured]
        if not math.isfinite(sizes[0]):
            return False
        return max(sizes) >= _SMALLEST_LOSS if self._must_be_large else sizes[0] > 0

    @property
    def _must_be_large(self) -> bool:
        return not self._is_gradient and self._ranks.bare.training

    def _passed(self, sample: Sample, passes: tuple[Inputs, ...]) -> list[_Measured] | DidNotFit:
        measured: list[_Measured] = []
        for some in passes:
            is_whole = some is sample.whole
            one = self._pass(some, is_whole=is_whole)
            if (
                not isinstance(one, DidNotFit)
                and is_whole
                and self._ranks.highest(self._steady.drawers.to_eval())
            ):
                one = self._pass(some, is_whole=True)
            if isinstance(one, DidNotFit):
                return one
            measured.append(one)
        return measured

    def _pass(self, some: Inputs, *, is_whole: bool) -> _Measured | DidNotFit:
        self._steady.begin(is_whole=is_whole)
        try:
            if self._is_gradient:
                return self._ranks.gradient(lambda: self._loss(some), self._parameters)
            return attempt(lambda: self._value(some))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the model's own, about a size that it never meets in training
            self._ranks.part_failed(error)
            raise IndivisibleError(
                f"a part of it cannot be computed: {type(error).__name__}: {error}"
            ) from error

    def _value(self, some: Inputs) -> _Measured:
        with torch.no_grad():
            return [self._loss(some).detach().cpu().double().reshape(1)]

    def _tolerance(self) -> float:
        if self._trainer.accelerator.mixed_precision != "no" or self._watch.is_autocast:
            return _TOLERANCE_LOW
        tolerance = max(_TOLERANCE.get(p.dtype, _TOLERANCE_LOW) for p in self._parameters)
        return (
            max(tolerance, _TOLERANCE_TF32)
            if torch.get_float32_matmul_precision() != "highest"
            else tolerance
        )


def _whole(error: float) -> int:
    """Return an error in units of 1e-9: ranks vote by whole numbers."""
    return round(1e9 * (min(error, _NOT_A_NUMBER) if math.isfinite(error) else _NOT_A_NUMBER))


def _error(whole: _Measured, parts: list[_Measured], factors: list[float]) -> float:
    """Return how far the weighted parts are from the whole, relative to the larger of both.

    It is the distance of the tensor that is farthest. A part that weighs nothing is left out: a
    mean over no token is not a number.
    """
    least = _LEAST_FRACTION * max(float(one.norm()) for one in whole)
    worst = 0.0
    for one, *some in zip(whole, *parts, strict=True):
        weighted = [part * factor for part, factor in zip(some, factors, strict=True) if factor]
        size = max([float(one.norm()), least, *(float(part.norm()) for part in weighted)])
        off = float((sum(weighted) - one).norm())
        worst = max(worst, off / size if size > 0 else off) if math.isfinite(off) else math.inf
    return worst
