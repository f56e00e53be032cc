"""Neighbours: find out whether a row comes out otherwise if the rows beside it are others.

A measurement with all numbers held misses a module that mixes rows by chance. So rows pass twice,
with the same random numbers and other rows beside them, at several draws. All shapes are the same,
so a row that nothing mixes is the same to the last digit, in any type.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer_plugins.survival.attempt.attempt import DidNotFit, attempt
from trainer_plugins.survival.attempt.generators import Generators, draw_all
from trainer_plugins.survival.attempt.state import Moved, State, why_rows_differ
from trainer_plugins.survival.certificate.held import HeldAt, rounded_differently, signs
from trainer_plugins.survival.exact.finality import small_parameters
from trainer_plugins.survival.exact.layouts import Layout, Rows
from trainer_plugins.survival.exact.shares import Inputs
from trainer_plugins.survival.ranks.alone import Ranks

_MOST_EXAMPLES = 16
_NUM_SEEDS = 6

# An event of one in a hundred happens at one of the two levels, or at both.
_LEVELS = (0.005, 0.995)

_OF_ROUNDING = 10.0  # times what other rounding changes, a row has changed

Draw = Callable[[], AbstractContextManager[object]]

_Row = tuple[str, torch.Tensor]  # a module's name, and of each row that it returned three numbers


class _DoesNotFitError(Exception):
    """Raised when a pass did not fit: fewer examples may."""


@dataclass(frozen=True, slots=True)
class _Arranged:
    """Holds a batch, and the same with other examples in its second half."""

    one: Inputs
    other: Inputs
    is_alike: torch.Tensor  # the rows that both have in the same place


@dataclass(slots=True)
class _Passed:
    rows: list[_Row]
    drawn: list[object]  # the states of all generators after it
    moved: dict[str, Moved]  # what it has moved


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Compares rows that pass beside others, on all ranks that measure together."""

    ranks: Ranks
    sees_all: bool  # whether what the model returns compares rows, as its loss does
    loss: Callable[[Inputs], torch.Tensor]
    state: State
    put_back: Callable[[], object]  # restores random numbers and metrics

    def why_mixed(self, layout: Layout, inputs: Inputs, *, is_thorough: bool) -> str:
        """Say which module mixes rows, as far as the draws show; empty if none does."""
        is_of_rows = isinstance(layout, Rows)
        num = self.ranks.lowest(min(layout.count(inputs), _MOST_EXAMPLES) if is_of_rows else 0)
        draws = self._draws() if is_thorough else [nullcontext]
        while isinstance(layout, Rows) and num >= 2:
            arranged = _arrangements(layout, layout.probe(inputs, num), num)
            try:
                return next(filter(None, (self._found(arranged, draw) for draw in draws)), "")
            except _DoesNotFitError:
                num //= 2
        return ""

    def _found(self, arranged: list[_Arranged], draw: Draw) -> str:
        for batches in arranged:
            one, other = (self._pass(some, batches, draw) for some in (batches.one, batches.other))
            if self.ranks.on_any(not (one and other)) or not (one and other):
                return ""  # it raises with such numbers
            # How many numbers are drawn may depend on the rows: then they are arranged otherwise.
            if self.ranks.on_any(not all(map(_is_same_state, one.drawn, other.drawn))):
                continue
            if not self.ranks.on_any(_off(one.rows[-1:], other.rows[-1:]) > 0):
                return ""
            with rounded_differently(self.ranks.bare):
                again = self._pass(batches.one, batches, draw)
            said = self._said(one.rows, other.rows, again.rows, batches) if again else ""
            if said and (kept := why_rows_differ(one.moved, other.moved, ())):
                said += f"; {kept}"
            if self.ranks.on_any(bool(said)):
                return said or "rows are mixed on another rank, which says where"
            return ""
        return ""

    def _pass(self, some: Inputs, batches: _Arranged, draw: Draw) -> _Passed | None:
        self.put_back()
        self.state.restore()
        passed: list[_Passed] = []

        def work() -> torch.Tensor:
            with _watched(self.ranks.bare, batches.is_alike, self.sees_all) as rows, draw():
                loss = self.loss(some)
            drawn = [*Generators(self.ranks.device).state(), *self.state.drawn()]
            passed[:] = [_Passed(rows, drawn, self.state.moved())]
            return loss

        try:
            if self.ranks.measures_together:  # a pass of theirs ends with a backward pass
                outcome: object = self.ranks.gradient(work, small_parameters(self.ranks.bare))
            else:
                outcome = attempt(work, device=self.ranks.device)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - the model's own
            self.ranks.part_failed(error)
            return None
        if isinstance(outcome, DidNotFit):
            raise _DoesNotFitError
        return passed[0]

    def _draws(self) -> list[Draw]:
        levels = [partial(_at_level, level) for level in _LEVELS]
        return [nullcontext, *levels, *(partial(self._seeded, 1 + n) for n in range(_NUM_SEEDS))]

    @contextmanager
    def _seeded(self, seed: int) -> Iterator[None]:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.state.draw_more(seed)
        yield

    def _said(
        self, one: list[_Row], other: list[_Row], again: list[_Row], batches: _Arranged
    ) -> str:
        """Name the first module in which rows have changed by more than rounding."""
        if not len(one) == len(other) == len(again):
            return ""
        changed = []
        for place, (name, _) in enumerate(one):
            here = slice(place, place + 1)
            off, noise = _off(one[here], other[here]), _off(one[here], again[here])
            changed.append((off > _OF_ROUNDING * noise, name, off))
        if not changed[-1][0]:
            return ""  # a module inside may sort rows, and another put them back
        _, name, off = next(each for each in changed if each[0])
        kind = type(self.ranks.bare.get_submodule(name)).__name__
        where = f"`{name}` ({kind})" if name else kind
        num = int(batches.is_alike.sum())
        return (
            f"{where} mixes the rows of a micro-batch: {num} of them changed by {off:.1e} when "
            "those beside them were others, with the same random numbers"
        )


@contextmanager
def _at_level(level: float) -> Iterator[None]:
    draw_all(level)
    with HeldAt(level):
        yield


def _arrangements(layout: Rows, few: Inputs, num: int) -> list[_Arranged]:
    """Put the first examples beside themselves; or the others in another order."""
    half = num // 2
    first, rest = [*range(half)], [*range(half, num)]
    one, arranged = layout.pick(few, [*first, *rest]), []
    for order in ([*first, *first, *rest][:num], [*first, *rest[1:], *rest[:1]]):
        other = layout.pick(few, order)
        alike = [
            (value == other[name]).flatten(1).all(1) if value.dim() > 1 else value == other[name]
            for name, value in one.items()
            if torch.is_tensor(value) and value.dim() and len(value) == num * layout.per_example
        ]
        is_alike = torch.stack([each.cpu() for each in alike]).all(0)
        arranged.append(_Arranged(one, other, is_alike))
    return arranged


@contextmanager
def _watched(model: nn.Module, is_alike: torch.Tensor, sees_all: bool) -> Iterator[list[_Row]]:
    """Note three numbers of each row that both batches have, wherever a module returns rows."""
    rows: list[_Row] = []

    def note(name: str, _: nn.Module, __: object, output: object) -> None:
        for value in _tensors(output):
            if value.dim() > 1 and len(value) == len(is_alike) and value.is_floating_point():
                kept = value.detach()[is_alike.to(value.device)].flatten(1)
                kept = kept.to(torch.promote_types(kept.dtype, torch.float32))
                spread = signs(kept.size(1), kept)
                marks = (kept @ spread, kept @ spread.roll(1), kept.norm(dim=1))
                rows.append((name, torch.stack(marks, 1).cpu()))

    hooks = [
        module.register_forward_hook(partial(note, name))
        for name, module in model.named_modules()
        if name or not sees_all
    ]
    try:
        yield rows
    finally:
        for hook in hooks:
            hook.remove()


def _tensors(output: object) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, list | tuple | Mapping):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(value)


def _off(one: list[_Row], other: list[_Row]) -> float:
    """Return how far rows are apart, as a part of their size."""
    worst = 0.0
    for (_, mine), (_, theirs) in zip(one, other, strict=True):
        if mine.shape != theirs.shape or not mine.numel():
            continue
        off, size = (mine - theirs).abs().amax(1), mine[:, 2].clamp(min=1e-30)
        worst = max(worst, float((off / size).nan_to_num(0.0).max()))
    return worst


def _is_same_state(one: Any, other: Any) -> bool:
    if torch.is_tensor(one):
        return bool(torch.equal(one, other))
    if isinstance(one, tuple):
        return all(map(_is_same_state, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same_state(one[k], other[k]) for k in one)
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)
