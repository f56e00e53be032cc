"""Comparison: compute a sample and its parts, and say how far apart they are."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.survival.attempt.attempt import DidNotFit, attempt
from trainer_plugins.survival.attempt.state import Moved, State, is_same
from trainer_plugins.survival.certificate.class_weights import ClassWeights
from trainer_plugins.survival.certificate.held import Drawers, held
from trainer_plugins.survival.certificate.rounding import rounded_anew
from trainer_plugins.survival.certificate.samples import Sample
from trainer_plugins.survival.exact.finality import Watch, without_reentry
from trainer_plugins.survival.exact.layouts import IndivisibleError, Inputs
from trainer_plugins.survival.exact.losses import Family
from trainer_plugins.survival.exact.modules import why_not_divided
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

_FORWARD = 1 / 3
"""Cost of a forward pass, as a part of a forward and backward pass."""

Loss = Callable[[Inputs], torch.Tensor]
_Measured = list[torch.Tensor]
"""One tensor a parameter or a reduction, or the loss alone."""


class NotAdditiveError(IndivisibleError):
    """Raised when the parts of a micro-batch were measured, and do not add up."""


class Steady:
    """Lets each pass begin from the same state, so that passes can be compared."""

    def __init__(self, state: State, drawers: Drawers, put_back: Callable[[], object]) -> None:
        self.state, self.drawers, self._put_back = state, drawers, put_back

    def begin(self, *, goes_on: bool = False) -> None:
        """Begin a pass: with the state that the one before has left, if it `goes_on`."""
        if not goes_on:
            self._put_back()
            self.state.restore()
        self.drawers.begin()


@contextmanager
def steady(model: nn.Module, state: State, put_back: Callable[[], object]) -> Iterator[Steady]:
    """Surround passes that can be compared."""
    with without_reentry(model), held(model) as drawers:
        try:
            yield Steady(state, drawers, put_back)
        finally:
            state.restore()


@dataclass(frozen=True, slots=True)
class Told:
    """Holds what a sample has shown."""

    sample: Sample
    errors: dict[Weight, float]
    """How far the parts are from the whole by each weight, on the rank where they are farthest."""
    tolerance: float
    words: str
    is_gradient: bool


class Comparison:
    """Compares samples with their parts, together with the ranks that measure with this one."""

    def __init__(
        self,
        trainer: HfTrainer,
        ranks: Ranks,
        family: Family,
        loss: Loss,
        parameters: list[nn.Parameter],
        watch: Watch,
        steady: Steady,
        scale: float,
    ) -> None:
        self._trainer, self._ranks, self._family, self._loss = trainer, ranks, family, loss
        self._parameters, self._watch, self._steady = parameters, watch, steady
        self._scale = scale
        self.weights = family.weights
        """The weights that are compared."""
        self.why_untold = "it takes two examples to measure that they add up"
        self.cost = 0.0
        """Cells that were computed forward and backward."""
        self.why_moved = ""
        """Why what passes have moved forbids a division; empty if nothing does."""
        self.overwritten: set[str] = set()
        """Places that a pass writes anew, whatever it finds there (`_look_at_state`)."""
        self._is_gradient = True

    def look(self, class_weights: ClassWeights, few: Inputs) -> None:
        """Compare by class weights too, if the loss of a few examples is weighted by some."""
        self._steady.begin()
        attempt(lambda: class_weights.look(lambda: self._loss(few)))
        self.weights = (*class_weights.weights, *self._family.weights)

    def end_with(self, samples: list[Sample], idle: Sample) -> None:
        """Compute a whole and its parts last, from which `gathers.py` learns how metrics add up.

        Raises:
            IndivisibleError: no sample fits.
        """
        for sample in self._in_turn(samples, idle):
            passed = [self._pass(some) for some in (sample.whole, *sample.parts)]
            if not self._ranks.highest(sum(isinstance(one, DidNotFit) for one in passed)):
                return
        raise IndivisibleError("there was no room to measure how its metrics add up")

    def first_that_tells(
        self, samples: list[Sample], idle: Sample, *, is_gradient: bool
    ) -> Told | None:
        """Measure the largest sample that fits and has something to measure.

        Returns:
            What it has shown; None, on every rank, if there is no such sample.
        """
        self._is_gradient = is_gradient
        for sample in self._in_turn(samples, idle):
            if (told := self._told(sample, is_idle=not samples)) is not None:
                return told
        return None

    def _in_turn(self, samples: list[Sample], idle: Sample) -> Iterator[Sample]:
        """Give as many samples as the rank with most has, the last one again where they end."""
        for place in range(self._ranks.highest(len(samples))):
            yield samples[min(place, len(samples) - 1)] if samples else idle

    def said(self, told: Told) -> str:
        """Say that no weight fits, with the numbers, or that the same rows differ in each pass."""
        self._is_gradient = told.is_gradient
        again = [self._pass(told.sample.whole) for _ in range(2)]
        if all(isinstance(one, list) for one in again):
            first, second = again
            noise = _error(first, [second])  # type: ignore[arg-type, list-item]
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
            f"by {tried}{self._said_of_weights(told)}"
            + (f"; {self.why_moved}" if self.why_moved else "")
        )

    def _said_of_weights(self, told: Told) -> str:
        """Say that a loss is a mean by weights which are not known, if it is; empty if not."""
        if not self._family.is_vouched:
            return ""
        passes = [self._pass(some) for some in (told.sample.whole, *told.sample.parts)]
        if any(isinstance(one, DidNotFit) for one in passes):
            return ""
        whole, *parts = (torch.cat(one) for one in passes)  # type: ignore[arg-type]
        if not all(bool(one.isfinite().all()) for one in (whole, *parts)):
            return ""
        first, second = (
            torch.linalg.lstsq(torch.stack(parts, 1), whole[:, None]).solution[:, 0].tolist()
        )
        off = float((first * parts[0] + second * parts[1] - whole).norm() / whole.norm())
        if off > told.tolerance or abs(first + second - 1) > told.tolerance:
            return ""
        return (
            f"; it is a mean by weights of its own, here {first:.3g} and {second:.3g}: those of a "
            "torch.nn.functional.cross_entropy(weight=...) are known, and a sum that is divided by "
            "num_items_in_batch needs none"
        )

    @property
    def _what(self) -> str:
        return "gradient" if self._is_gradient else "loss"

    def _told(self, sample: Sample, *, is_idle: bool) -> Told | None:
        measured = self._measured(sample)
        failed = isinstance(measured, DidNotFit)
        if self._ranks.highest(int(failed)):
            line = measured.first_line if isinstance(measured, DidNotFit) else "on another rank"
            self.why_untold = (
                f"there was no room to measure whether its loss can be divided ({line})"
            )
            return None
        assert not isinstance(measured, DidNotFit)
        whole, parts = measured
        tells = not is_idle and self._tells(
            [whole, *(one for some in parts.values() for one in some)]
        )
        if not self._ranks.highest(int(tells)):
            self.why_untold = (
                f"its {self._what} is 0, or not a number, on {sum(sample.nums)} examples, so it "
                "cannot be measured whether it is the sum of its parts'"
            )
            return None
        errors = {
            weight: self._ranks.highest(_whole(_error(whole, some) if tells else 0.0)) / 1e9
            for weight, some in parts.items()
        }
        words = f"{sample.words}, {self._how()}"
        words += "" if self._is_gradient or not self._ranks.bare.training else ", by the loss alone"
        told = Told(sample, errors, self._tolerance(), words, self._is_gradient)
        return None if self._is_rounding(told, whole, tells=tells) else told

    def _is_rounding(self, told: Told, whole: _Measured, *, tells: bool) -> bool:
        """Tell whether what no weight fits is nothing but rounding, so that the sample is no proof.

        The gradients of chosen and rejected answers that are alike cancel, for one.
        """
        least = min(told.errors.values())
        if not self._is_gradient or not told.tolerance < least < _NOT_A_NUMBER:
            return False
        with rounded_anew(self._ranks.bare):
            again = self._pass(told.sample.whole)
        # Without room for that it is not known, and a smaller sample has to tell.
        noise = math.inf if isinstance(again, DidNotFit) else _error(whole, [again])
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

    def _measured(
        self, sample: Sample
    ) -> tuple[_Measured, dict[Weight, list[_Measured]]] | DidNotFit:
        """Compute a sample, and its parts by each weight, as training would.

        The gradient of a part is that of its loss times its factor: what a module injects in the
        backward pass does not grow with the factor.
        """
        whole = self._pass(sample.whole)
        if not isinstance(whole, DidNotFit) and self._ranks.highest(self._steady.drawers.to_eval()):
            whole = self._pass(sample.whole)
        if isinstance(whole, DidNotFit):
            return whole
        moved = [self._steady.state.moved()]
        parts: dict[Weight, list[_Measured]] = {weight: [] for weight in self.weights}
        for place, part in enumerate(sample.parts):
            passed: dict[float, _Measured] = {}
            for weight in self.weights:
                factor = sample.factors(weight)[place]
                before = factor if self._is_gradient else 1.0  # a loss is multiplied afterwards
                if before not in passed or self._ranks.measures_together:
                    one = self._pass(part, before)
                    if isinstance(one, DidNotFit):
                        return one
                    passed[before] = one
                if factor:  # a mean over no token is not a number
                    one = passed[before]
                    parts[weight].append(
                        one if before == factor else [each * factor for each in one]
                    )
            moved.append(self._steady.state.moved())
        if self._ranks.highest(int(any(moved) and self._ranks.bare.training)):
            self._look_at_state(sample, moved)
        return whole, parts

    def _look_at_state(self, sample: Sample, moved: list[dict[str, Moved]]) -> None:
        """Find out whether pieces that each begin with the same state leave that of the whole.

        They do if a pass moves it alike whatever its rows are, as a counter, or writes it anew
        whatever it was before, as the last output.
        """
        again = self._pass(sample.parts[1], goes_on=True)
        after = self._steady.state.moved()
        repeated = self._pass(sample.parts[1])
        moved = [*moved, after, self._steady.state.moved()]
        if isinstance(again, DidNotFit) or isinstance(repeated, DidNotFit):
            return
        why = why_not_divided(one for some in moved for one in some.values())
        for key in {key for some in moved for key in some}:
            whole, first, second, later, once_more = (
                some[key].value if key in some else None for some in moved
            )
            if is_same(second, later) or not is_same(second, once_more):  # or it is a time
                self.overwritten.add(key)
            elif not (is_same(whole, first) and is_same(whole, second)):
                words = next(some[key].words for some in moved if key in some)
                why = why or f"{words} is moved by each pass according to its rows"
        if self._ranks.highest(int(bool(why))):
            self.why_moved = why or "a pass of another rank moves the state of the model"

    def _pass(
        self, some: Inputs, factor: float = 1.0, *, goes_on: bool = False
    ) -> _Measured | DidNotFit:
        self._steady.begin(goes_on=goes_on)
        self.cost += (1 if self._is_gradient else _FORWARD) * cells(some)
        try:
            if self._is_gradient:
                scale = factor * self._scale
                return self._ranks.gradient(lambda: self._loss(some) * scale, self._parameters)
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


def _error(whole: _Measured, parts: list[_Measured]) -> float:
    """Return how far the weighted parts are from the whole, relative to the larger of both.

    It is the distance of the tensor that is farthest.
    """
    least = _LEAST_FRACTION * max(float(one.norm()) for one in whole)
    worst = 0.0
    for one, *some in zip(whole, *parts, strict=True):
        size = max([float(one.norm()), least, *(float(part.norm()) for part in some)])
        off = float((sum(some) - one).norm())
        worst = max(worst, off / size if size > 0 else off) if math.isfinite(off) else math.inf
    return worst
