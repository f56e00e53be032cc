"""Neighbours: tests whether a row's result depends on the rows beside it.

Measuring with all random numbers held misses a module that mixes rows by chance. So we pass rows
twice, at several draws, with the same random numbers and different rows beside them. All shapes are
the same, so a row that nothing mixes is equal to the last digit, in any type.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from transformers import set_seed

from trainer_plugins.survival.attempt.attempt import DidNotFit, attempt
from trainer_plugins.survival.attempt.generators import Generators, draw_all
from trainer_plugins.survival.attempt.state import Moved, State, explain_rows_differ, is_same
from trainer_plugins.survival.certificate.held import OF_ROUNDING, HeldAt, round_differently, signs
from trainer_plugins.survival.exact.layouts import Layout, Rows
from trainer_plugins.survival.exact.shares import Inputs
from trainer_plugins.wrapped import tensors_in

_MOST_EXAMPLES = 16
_NUM_SEEDS = 6

# An event with probability 0.01 happens at one of the two levels, or at both.
_LEVELS = {0.005: 0xD67B23A1, 0.995: 0xC4A6B812}  # and the words for `draw_all`

# A module that gets the same rows may round them differently with another kernel.
_LEAST_CHANGE, _NUM_DIGITS = 1e-5, 4  # relative to a row, and in last digits of its type

Draw = Callable[[], AbstractContextManager[object]]


class _Rows(NamedTuple):
    """A summary of a module's output: three numbers per row."""

    module: str
    marks: torch.Tensor
    least: float  # smallest change of a row that is not rounding

    def off(self, other: "_Rows") -> float:
        """Return the relative distance between the same rows."""
        if self.marks.shape != other.marks.shape or not self.marks.numel():
            return 0.0
        off, size = (self.marks - other.marks).abs().amax(1), self.marks[:, 2].clamp(min=1e-30)
        return float((off / size).nan_to_num(0.0).max())


class _DoesNotFitError(Exception):
    """Raised when a pass did not fit: fewer examples may."""


# A batch, the same with other examples in its second half, and the rows that are equal in both.
_Arranged = tuple[Inputs, Inputs, torch.Tensor]


@dataclass(slots=True)
class _Passed:
    rows: list[_Rows]
    drawn: list[object]  # states of all generators after the pass
    moved: dict[str, Moved]  # changes that the pass made


@dataclass(slots=True)
class Neighbours:
    """Compares rows next to different neighbours, on a rank that measures alone."""

    model: nn.Module
    device: torch.device
    sees_all: bool  # the model's output compares rows, as its loss does
    loss: Callable[[Inputs], torch.Tensor]
    state: State
    put_back: Callable[[], object]  # restores random numbers and metrics
    moves_state: bool = False  # a pass changed state, so later ones may differ

    def explain_mixed(self, layout: Layout, inputs: Inputs, *, is_thorough: bool) -> str:
        """Name a module that mixes rows, as far as the draws show; empty if none does."""
        draws: list[Draw] = [nullcontext]
        if is_thorough:
            draws += [partial(_set_level, *level) for level in _LEVELS.items()]
            draws += [partial(self._seed, 1 + number) for number in range(_NUM_SEEDS)]
        num = min(layout.count(inputs), _MOST_EXAMPLES)
        while isinstance(layout, Rows) and num >= 2:
            arranged = _arrangements(layout, layout.probe(inputs, num), num)
            try:
                return next(filter(None, (self._find(arranged, draw) for draw in draws)), "")
            except _DoesNotFitError:
                num //= 2
        return ""

    def _find(self, arranged: list[_Arranged], draw: Draw) -> str:
        for batch, with_others, is_alike in arranged:
            one, other = (self._pass(some, is_alike, draw) for some in (batch, with_others))
            if one is None or other is None:
                return ""  # the model raises with such numbers
            # The number of draws may depend on the rows: try another arrangement.
            if not is_same(one.drawn, other.drawn):
                continue
            pairs = len(one.rows) == len(other.rows) and bool(one.rows)
            if not pairs or one.rows[-1].off(other.rows[-1]) == 0:
                return ""
            with round_differently(self.model):
                again = self._pass(batch, is_alike, draw)
            return _describe(one, other, again, int(is_alike.sum())) if again else ""
        return ""

    def _pass(self, some: Inputs, is_alike: torch.Tensor, draw: Draw) -> _Passed | None:
        self.put_back()
        self.state.restore()

        def work() -> _Passed:
            with _watch(self.model, is_alike, self.sees_all) as rows, draw():
                self.loss(some)
            drawn = [*Generators(self.device).states, *self.state.read_generators()]
            moved = self.state.find_moved()
            self.moves_state |= bool(moved)
            return _Passed(rows, drawn, moved)

        try:
            outcome = attempt(work, self.device)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # noqa: BLE001 - the model's own
            return None
        if isinstance(outcome, DidNotFit):
            raise _DoesNotFitError
        return outcome

    @contextmanager
    def _seed(self, seed: int) -> Iterator[None]:
        set_seed(seed)
        self.state.draw_more(seed)
        yield


@contextmanager
def _set_level(level: float, word: int) -> Iterator[None]:
    draw_all(word)
    with HeldAt(level):
        yield


def _arrangements(layout: Rows, few: Inputs, num: int) -> list[_Arranged]:
    """Put the first examples beside themselves, or the others in another order."""
    half = num // 2
    first, rest = [*range(half)], [*range(half, num)]
    one, arranged = layout.pick(few, [*first, *rest]), list[_Arranged]()
    for order in ([*first, *first, *rest][:num], [*first, *rest[1:], *rest[:1]]):
        other = layout.pick(few, order)
        alike = [
            (value == other[name]).flatten(1).all(1) if value.dim() > 1 else value == other[name]
            for name, value in one.items()
            if torch.is_tensor(value) and value.dim() and len(value) == num * layout.per_example
        ]
        is_alike = torch.stack([each.cpu() for each in alike]).all(0)
        arranged.append((one, other, is_alike))
    return arranged


@contextmanager
def _watch(model: nn.Module, is_alike: torch.Tensor, sees_all: bool) -> Iterator[list[_Rows]]:
    """Record three numbers per row common to both batches, at each module that returns rows."""
    rows: list[_Rows] = []

    def note(name: str, module: nn.Module, _: object, output: object) -> None:
        words = f"`{name}` ({type(module).__name__})" if name else type(module).__name__
        for value in tensors_in(output):
            if value.dim() > 1 and len(value) == len(is_alike) and value.is_floating_point():
                kept = value.detach()[is_alike.to(value.device)].flatten(1)
                kept = kept.to(torch.promote_types(kept.dtype, torch.float32))
                spread = signs(kept.size(1), kept)
                marks = (kept @ spread, kept @ spread.roll(1), kept.norm(dim=1))
                least = max(_LEAST_CHANGE, _NUM_DIGITS * torch.finfo(value.dtype).eps)
                rows.append(_Rows(words, torch.stack(marks, 1).cpu(), least))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name or not sees_all:
                hooks.enter_context(module.register_forward_hook(partial(note, name)))
        yield rows


def _describe(one: _Passed, other: _Passed, again: _Passed, num_alike: int) -> str:
    """Name the first module whose rows changed by more than rounding."""
    # One module may sort rows and another restore their order: the last one must differ.
    if len(one.rows) != len(again.rows) or one.rows[-1].off(other.rows[-1]) <= one.rows[-1].least:
        return ""
    is_rounded = False
    for mine, theirs, rounded in zip(one.rows, other.rows, again.rows, strict=True):
        off, least = mine.off(theirs), mine.least
        if is_rounded:  # once a digit differs, later differences may be amplified rounding
            least = max(least, OF_ROUNDING * mine.off(rounded))
        is_rounded |= off > 0
        if off > least:
            kept = explain_rows_differ(one.moved, other.moved, ())
            return (
                f"{mine.module} mixes the rows of a micro-batch: {num_alike} of "
                f"them changed by {off:.1e} when other rows stood beside them, with the same "
                "random numbers" + (f"; {kept}" if kept else "")
            )
    return ""
