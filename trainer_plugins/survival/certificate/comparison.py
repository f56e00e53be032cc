"""Comparison: computes a sample and its parts, and measures the difference."""

import math
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import torch
from torch import nn

from trainer_plugins.survival.attempt.attempt import DidNotFit, attempt
from trainer_plugins.survival.attempt.state import GROWN, Moved, State, explain_not_divided, is_same
from trainer_plugins.survival.certificate.held import OF_ROUNDING, Drawers, round_differently
from trainer_plugins.survival.certificate.samples import Measurement, Probe
from trainer_plugins.survival.exact.coupled import Divided
from trainer_plugins.survival.exact.finality import Watch
from trainer_plugins.survival.exact.shares import (
    IndivisibleError,
    Inputs,
    Weight,
    compute_without_graph,
    find_class_weights,
)
from trainer_plugins.survival.limit.limit import cells
from trainer_plugins.survival.ranks.alone import Ranks
from trainer_plugins.survival.words import part_raised

# Above the rounding of a right weight (1e-7 in float32, 2e-3 in bfloat16, at 16 and 28 layers), and
# below the error of a wrong one. Many models compute the loss in float32 whatever their type.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}
_TOLERANCE_TF32 = 5e-3
_TOLERANCE_LOW = 3e-2

_LEAST_FRACTION = 1e-2  # of the largest gradient: a smaller one may be only rounding

_NOT_A_NUMBER = 1e9  # error of a part whose gradient or loss is not finite

_SMALLEST_LOSS = 1e-2  # below, a loss may be rounding (terms of GRPO cancel): see the gradient

_FORWARD = 1 / 3  # cost of a forward pass, relative to forward and backward

_NOT_MEASURABLE = "so survival cannot measure whether pieces add up"

_Measured = list[torch.Tensor]  # one tensor per parameter or reduction, or only the loss


class NotAdditiveError(IndivisibleError):
    """Raised when the parts of a micro-batch were measured and do not add up."""


Loss = Callable[[Inputs, Divided | None], torch.Tensor]  # of inputs, which may be a part


@dataclass(slots=True)
class Comparison:
    """Compares samples with their parts, together with the ranks that measure with this one.

    Each pass starts from the same state.
    """

    ranks: Ranks
    weights: tuple[Weight, ...]  # weights to compare
    lent: Probe  # for a rank without samples of its own
    loss: Loss
    scale: float  # factor that training applies to the loss before its backward pass
    parameters: list[nn.Parameter]  # parameters whose gradient is measured
    watch: Watch
    state: State
    drawers: Drawers
    put_back: Callable[[], object]  # restores random numbers and metrics
    why_inconclusive: str = "measuring whether pieces add up takes at least two examples"
    cost: float = 0.0  # cells computed forward and backward
    why_moved: str = ""  # why a change made by passes forbids splitting; empty if none does
    overwritten: set[str] = field(default_factory=set)  # places that a pass overwrites completely
    # Places that count or record rows, and change no gradient.
    notes: set[str] = field(default_factory=set)
    did_not_fit: list[Probe] = field(default_factory=list)  # on this rank or another
    _is_gradient: bool = True

    def find_class_weights(self, few: Inputs) -> tuple[Weight, ...] | DidNotFit:
        """Find the class weights in the loss of a few examples."""
        self._begin()
        return attempt(lambda: find_class_weights(lambda: self.loss(few, None)))

    def end_with(self, samples: list[Probe]) -> None:
        """Compute a whole and its parts last, to show `gathers.py` how metrics add up."""
        for sample in self._take_turns(samples):
            passed = [self._pass(some, sample=sample) for some in (sample.whole, *sample.parts)]
            if not self.ranks.on_any(any(isinstance(one, DidNotFit) for one in passed)):
                return
        raise IndivisibleError("there was not enough memory to measure how its metrics add up")

    def first_conclusive(self, samples: list[Probe], *, is_gradient: bool) -> Measurement | None:
        """Measure the largest sample that fits and is conclusive; None on every rank if none is."""
        self._is_gradient = is_gradient
        for sample in self._take_turns(samples):
            if (told := self._measure(sample, is_idle=not samples)) is not None:
                return told
        return None

    def _take_turns(self, samples: list[Probe]) -> Iterator[Probe]:
        """Yield as many samples as the rank with most has, repeating the last one."""
        for place in range(self.ranks.highest(len(samples))):
            yield samples[min(place, len(samples) - 1)] if samples else self.lent

    def describe(self, told: Measurement) -> str:
        """Report that no weight fits, with the numbers."""
        self._is_gradient = told.is_gradient
        if min(told.errors.values()) >= _NOT_A_NUMBER:
            return f"the {self._what} of a part is not a number: measured on {told.words}"
        tried = []
        for weight, error in told.errors.items():
            off = "not a number" if error >= _NOT_A_NUMBER else f"{error:.1e}"
            tried.append(f"{off} as {weight.name}")
        said = (
            f"its {self._what} is not the sum over its parts: measured on {told.words}, it is off "
            f"by {', '.join(tried)}"
        )
        return f"{said}; {self.why_moved}" if self.why_moved else said

    @property
    def _what(self) -> str:
        return "gradient" if self._is_gradient else "loss"

    @property
    def _is_loss_of_training(self) -> bool:
        return not self._is_gradient and self.ranks.bare.training

    def _measure(self, sample: Probe, *, is_idle: bool) -> Measurement | None:
        measured = self._compute_parts(sample)
        failure = measured if isinstance(measured, DidNotFit) else None
        if self.ranks.on_any(failure is not None) or isinstance(measured, DidNotFit):
            self.did_not_fit.append(sample)
            line = failure.first_line if failure is not None else "on another rank"
            self.why_inconclusive = report_no_room(line)
            return None
        whole, parts = measured
        tells = not is_idle and self._is_conclusive(
            [whole, *(one for some in parts.values() for one in some)]
        )
        if not self.ranks.on_any(tells):
            self.why_inconclusive = (
                f"its {self._what} is 0, or not a number, on {sample.num} examples, "
                f"{_NOT_MEASURABLE}"
            )
            return None
        errors = {
            weight: self._farthest(_error(whole, some) if tells else 0.0)
            for weight, some in parts.items()
        }
        tolerance, mode = self._tolerance(), self._describe_mode()
        told = Measurement(sample, errors, tolerance, mode, self._is_gradient)
        return None if self._is_rounding(told, whole, tells=tells) else told

    def _is_rounding(self, told: Measurement, whole: _Measured, *, tells: bool) -> bool:
        """Return whether an error that no weight explains is only rounding, and proves nothing."""
        # For example, the gradients of chosen and rejected answers that are alike cancel.
        least = min(told.errors.values())
        if not self._is_gradient or not told.tolerance < least < _NOT_A_NUMBER:
            return False
        with round_differently(self.ranks.bare):
            again = self._pass(told.sample.whole)
        # Without room for that pass we do not know, and a smaller sample decides.
        noise = math.inf if isinstance(again, DidNotFit) else _error(whole, [again])
        self.why_inconclusive = (
            f"its {self._what} is only rounding noise on {told.sample.num} examples, "
            f"{_NOT_MEASURABLE}"
        )
        return least <= OF_ROUNDING * self._farthest(noise if tells else 0.0)

    def _describe_mode(self) -> str:
        how = "in training mode" if self.ranks.bare.training else "in evaluation mode"
        if in_eval := self.drawers.in_eval:
            name = type(in_eval[0]).__name__
            how += f", but {name}, which draws by numpy or Python, without its children"
        return f"{how}, by the loss alone" if self._is_loss_of_training else how

    def _is_conclusive(self, measured: list[_Measured]) -> bool:
        sizes = [max(float(one.norm()) for one in some) for some in measured]
        if not math.isfinite(sizes[0]):
            return False
        return max(sizes) >= _SMALLEST_LOSS if self._is_loss_of_training else sizes[0] > 0

    def _compute_parts(
        self, sample: Probe
    ) -> tuple[_Measured, dict[Weight, list[_Measured]]] | DidNotFit:
        whole = self._pass(sample.whole)
        if not isinstance(whole, DidNotFit) and self.ranks.on_any(self.drawers.to_eval()):
            whole = self._pass(sample.whole)
        if isinstance(whole, DidNotFit):
            return whole
        moved = [self.state.find_moved()]
        parts = self._parts(sample, moved)
        if isinstance(parts, DidNotFit):
            return parts
        if self.ranks.on_any(any(moved) and self.ranks.bare.training):
            self._look_at_state(sample, moved)
        return whole, parts

    def _parts(
        self, sample: Probe, moved: list[dict[str, Moved]]
    ) -> dict[Weight, list[_Measured]] | DidNotFit:
        """Compute the parts of a sample by each weight; record each part's changes."""
        # Gradients injected in a module's backward pass do not scale with the factor of the loss.
        parts: dict[Weight, list[_Measured]] = {weight: [] for weight in self.weights}
        for place, part in enumerate(sample.parts):
            passed: dict[float, _Measured] = {}
            for weight in self.weights:
                factor = sample.factors(weight)[place]
                before = factor if self._is_gradient else 1.0  # a loss is multiplied afterwards
                if self.ranks.on_any(before not in passed):
                    one = self._pass(part, before, sample=sample)
                    if isinstance(one, DidNotFit):
                        return one
                    passed[before] = one
                if factor:  # a mean over no token is not a number
                    one = passed[before]
                    parts[weight].append(
                        one if before == factor else [each * factor for each in one]
                    )
            moved.append(self.state.find_moved())
        return parts

    def _look_at_state(self, sample: Probe, moved: list[dict[str, Moved]]) -> None:
        """Check whether pieces that start from the same state leave the same state as the whole."""
        # They do if each pass counts the same for any rows, or overwrites completely.
        again = self._pass(sample.parts[1], sample=sample, goes_on=True)
        after = self.state.find_moved()
        repeated = self._pass(sample.parts[1], sample=sample)
        moved = [*moved, after, self.state.find_moved()]
        if isinstance(again, DidNotFit) or isinstance(repeated, DidNotFit):
            return
        why = explain_not_divided(one for some in moved for one in some.values())
        words = {key: one.words for some in moved for key, one in some.items()}
        notes = set()
        for key in words:
            whole, first, second, later, repeat = (
                some[key].value if key in some else None for some in moved
            )
            if is_same(second, later) or not is_same(second, repeat):  # or it is a time
                self.overwritten.add(key)
            elif is_same(whole, first) and is_same(whole, second):
                continue
            elif _is_note(key, whole):
                notes.add(key)
            else:
                why = why or _describe_rows(words[key])
        if self.ranks.on_any(bool(notes)):
            noted = self._pass(sample.parts[1], sample=sample, notes=notes)
            if isinstance(noted, DidNotFit) or _error(repeated, [noted]) > 0:
                why = why or _describe_rows(
                    words[min(notes)] if notes else "a value on another rank"
                )
            self.notes |= notes
        if self.ranks.on_any(bool(why)):
            self.why_moved = why or "a forward pass on another rank changes the state of the model"

    def _begin(self, *, goes_on: bool = False, notes: Container[str] = ()) -> None:
        """Begin a pass, keeping the state, or only the `notes`, of the one before if asked to."""
        if not goes_on and not notes:
            self.put_back()
        if not goes_on:
            self.state.restore(notes)
        self.drawers.begin()

    def _pass(
        self,
        some: Inputs,
        factor: float = 1.0,
        *,
        sample: Probe | None = None,
        goes_on: bool = False,
        notes: Container[str] = (),
    ) -> _Measured | DidNotFit:
        whole = Divided(sample.whole, sample.parts) if sample else None
        self._begin(goes_on=goes_on, notes=notes)
        self.cost += (1 if self._is_gradient else _FORWARD) * cells(some)
        try:
            if self._is_gradient:
                scale = factor * self.scale
                return self.ranks.gradient(lambda: self.loss(some, whole) * scale, self.parameters)
            return attempt(lambda: self._value(some, whole))
        except self.ranks.fatal:
            raise
        except Exception as error:  # the model's own error, at a size it never meets in training
            raise IndivisibleError(part_raised(error)) from error

    def _value(self, some: Inputs, whole: Divided | None) -> _Measured:
        loss = compute_without_graph(lambda: self.loss(some, whole))
        return [loss.detach().cpu().double().reshape(1)]

    def _farthest(self, error: float) -> float:
        """Return the largest error of any rank; ranks vote by whole numbers."""
        error = min(error, _NOT_A_NUMBER) if math.isfinite(error) else _NOT_A_NUMBER
        return self.ranks.highest(round(1e9 * error)) / 1e9

    def _tolerance(self) -> float:
        mixed_precision = self.ranks.trainer.accelerator.mixed_precision
        if mixed_precision != "no" or self.watch.is_autocast:
            return _TOLERANCE_LOW
        tolerance = max(_TOLERANCE.get(p.dtype, _TOLERANCE_LOW) for p in self.parameters)
        is_tf32 = torch.get_float32_matmul_precision() != "highest"
        return max(tolerance, _TOLERANCE_TF32) if is_tf32 else tolerance


def _is_note(key: str, value: Any) -> bool:
    """Return whether a place is an integer count, or a list to which numbers are appended.

    Statistics are neither. Tensors in a list may be a memory bank, which is used once it is full.
    """
    is_log = key.endswith(GROWN) and isinstance(value, list)
    return type(value) is int or (is_log and all(isinstance(one, (Number, str)) for one in value))


def _describe_rows(words: str) -> str:
    return f"each pass changes {words} depending on its rows"


def report_no_room(line: str) -> str:
    """Report that a measurement did not fit, with the first line of its error."""
    return f"there was not enough memory to measure whether its loss can be divided ({line})"


def _error(whole: _Measured, parts: list[_Measured]) -> float:
    """Return the distance of the weighted parts from the whole, in the farthest tensor."""
    least = _LEAST_FRACTION * max(float(one.norm()) for one in whole)
    worst = 0.0
    for one, *some in zip(whole, *parts, strict=True):
        size = max([float(one.norm()), least, *(float(part.norm()) for part in some)])
        off = float((sum(some) - one).norm())
        worst = max(worst, off / size if size > 0 else off) if math.isfinite(off) else math.inf
    return worst
