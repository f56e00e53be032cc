"""Certificate: measures on a run's own rows which weights make pieces add up."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from trainer_plugins.survival.attempt.attempt import DidNotFit
from trainer_plugins.survival.attempt.holders import Roots
from trainer_plugins.survival.attempt.state import State
from trainer_plugins.survival.certificate import samples
from trainer_plugins.survival.certificate.comparison import Comparison, Loss, NotAdditiveError
from trainer_plugins.survival.certificate.held import Drawers, HeldAt
from trainer_plugins.survival.certificate.neighbours import Neighbours
from trainer_plugins.survival.certificate.samples import SHORT, Measurement
from trainer_plugins.survival.exact.coupled import Seam
from trainer_plugins.survival.exact.finality import (
    Watch,
    frozen,
    gradients_aside,
    replace_reentry,
    small_parameters,
)
from trainer_plugins.survival.exact.gathers import Gathers
from trainer_plugins.survival.exact.layouts import Layout
from trainer_plugins.survival.exact.losses import Family
from trainer_plugins.survival.exact.shares import (
    IGNORED,
    WITHOUT_LABELS,
    IndivisibleError,
    Inputs,
    Weight,
)
from trainer_plugins.survival.limit.limit import cells
from trainer_plugins.survival.ranks.alone import Ranks

logger = logging.getLogger(__name__)

_SPARING = 300  # the next check waits until pieces cost this many times its own cost

Kind = tuple[str, tuple[tuple[str, torch.dtype, int, bool], ...]]
"""A kind of batch: the unit of its layout; for each tensor, name, type, dimensions and gaps."""


class Certificate:
    """Measures which weights make pieces add up, in a run or (for losses) its evaluations."""

    def __init__(
        self,
        ranks: Ranks,
        gathers: Gathers,
        family: Family,
        roots: Roots,
        *,
        is_trained: bool = True,
    ) -> None:
        self._ranks, self._gathers, self._roots = ranks, gathers, roots
        self._family, self._is_trained = family, is_trained
        # The user's code takes part in a pass.
        self._has_own_code = bool(roots.objects) or family.is_vouched
        self._moves_state = False
        self._looked_at: set[int] = set()  # labels of rows that were compared next to others
        self._class_weights: tuple[Weight, ...] = ()  # in the mean of a loss, if the user vouches
        self._classes: set[int] = set()  # classes measured next to others, if the user vouches
        self._weights: dict[str, list[Weight]] = {}  # those that have fitted so far, by layout
        self._kinds: set[Kind] = set()
        self._refused: dict[Kind, str] = {}  # by kind: why it does not add up
        self._computed = self._next = 0.0
        self.why_broken = ""  # set if a later measurement failed: nothing is divided any more
        self.known = ""  # description of the last measurement: its sample and its result
        self.did_not_fit: list[tuple[int, int]] = []  # in the last: examples, and cells
        self.divided_since: int | None = None  # first step that was divided
        self.overwritten: set[str] = set()  # places that may differ after two pieces
        self.notes: set[str] = set()  # places that count or record rows: pieces continue them

    def full_state(self, roots: Roots | None = None) -> State:
        """Save everything that a pass may change; of library modules, the buffers."""
        has_parameters = not self._ranks.forward_is_shared
        return State(roots or self._roots, self._ranks.bare, has_parameters=has_parameters)

    def weight(self, layout: Layout, kind: Kind) -> Weight:
        why = self.why_broken or self._refused.get(kind, "")
        if why or not self.knows(layout):
            raise IndivisibleError(why or "survival has not measured whether its parts add up")
        return self._weights[layout.unit][0]

    def knows(self, layout: Layout) -> bool:
        return layout.unit in self._weights

    def wants(self, kind: Kind, inputs: Inputs) -> bool:
        return self.is_new(kind, inputs) or (
            not self.why_broken and kind in self._kinds and self._computed >= self._next
        )

    def is_new(self, kind: Kind, inputs: Inputs) -> bool:
        """Return whether no micro-batch of this kind or with such labels was measured yet."""
        if self.why_broken or kind in self._refused:
            return False
        return kind not in self._kinds or bool(self.new_classes(inputs))

    def new_classes(self, inputs: Inputs) -> frozenset[int]:
        """Return the unseen classes of a micro-batch that a loss might weight."""
        # While all rows are of one class, a mean weighted by class is a mean over rows.
        is_vouched, known = self._family.is_vouched, self._classes
        there = samples.classes(inputs, known) if is_vouched else frozenset[int]()
        return there - known if len(there) > 1 else frozenset()

    def note_computed(self, num_cells: int, step: int) -> None:
        self._computed += num_cells
        if self.divided_since is None:
            self.divided_since = step

    def measure(
        self,
        layout: Layout,
        inputs: Inputs,
        num_fit: int,
        loss: Loss,
        put_back: Callable[[], object],
        scale: float = 1.0,
    ) -> None:
        """Measure which weights make pieces add up. Raises IndivisibleError if none does."""
        # A rank without two examples joins the passes of the others.
        kind, lent = batch_kind(layout, inputs), samples.idle(layout, inputs)
        try:
            with (
                self._gathers.apart(shows_metrics=not self.knows(layout)),
                self._compare(lent, loss, scale, put_back) as comparison,
            ):
                weights = comparison.weights
                if not torch.is_tensor(inputs.get("labels")):
                    comparison.weights = tuple(w for w in weights if w in WITHOUT_LABELS) or weights
                elif self._family.is_vouched:
                    found = comparison.find_class_weights(layout.take(inputs, 0, 1))
                    if not isinstance(found, DidNotFit):
                        self._class_weights = found
                    comparison.weights = (*self._class_weights, *weights)
                fitted = self._weights.get(layout.unit, comparison.weights)
                comparison.weights = tuple(w for w in comparison.weights if w in fitted)
                if self._ranks.on_any(not comparison.weights):
                    raise NotAdditiveError("the class weights of its loss have changed")
                told = self._measure(comparison, layout, inputs, num_fit)
                remaining = self._judge(comparison, told, self.is_new(kind, inputs))
                if self._ranks.on_any(not self.knows(layout) and self._gathers.has_exchanged()):
                    comparison.end_with(samples.short(layout, inputs))
                self.overwritten |= comparison.overwritten
                self.notes |= comparison.notes
        except NotAdditiveError as error:
            self._refuse(kind, str(error))
            raise
        self._next = self._computed + _SPARING * (comparison.cost or cells(inputs))
        # Without a result earlier ones hold; one example only joined the passes of the others.
        if not told or layout.count(inputs) < 2:
            return
        self._weights[layout.unit] = remaining
        self._kinds.add(kind)
        self._classes |= self.new_classes(inputs)
        self.known = _describe_known(told)
        logger.info("%s", self.known)

    def looks_at(self, inputs: Inputs) -> bool:
        """Return whether to compare rows again before this micro-batch is divided."""
        # The user's code may depend on counts, and on labels.
        is_own = self._has_own_code and not self._ranks.forward_is_shared
        is_own &= not self.why_broken
        return is_own and (
            self._moves_state or bool(samples.labels_of_rows(inputs) - self._looked_at)
        )

    def look_at_neighbours(
        self,
        layout: Layout,
        inputs: Inputs,
        loss: Loss,
        put_back: Callable[[], object],
        *,
        is_thorough: bool,
    ) -> None:
        """Raise NotAdditiveError if the user's code mixes rows, at one of several draws.

        Not where ranks compute each pass together (FSDP, ZeRO-3): if the user's code raised at one
        of the draws on one rank, the others would wait.
        """
        if self._ranks.forward_is_shared or not self._has_own_code:
            return
        ranks, state = self._ranks, self.full_state()
        sees_all = isinstance(self._family.coupling, Seam)
        neighbours = Neighbours(
            ranks.bare, ranks.device, sees_all, lambda some: loss(some, None), state, put_back
        )
        try:
            with self._gathers.apart():
                why = neighbours.explain_mixed(layout, inputs, is_thorough=is_thorough)
        finally:
            put_back()
            state.restore()
        self._moves_state |= neighbours.moves_state
        self._looked_at |= samples.labels_of_rows(inputs)
        if why:
            self._refuse(batch_kind(layout, inputs), why)
            raise NotAdditiveError(why)

    def _refuse(self, kind: Kind, why: str) -> None:
        if self.divided_since is not None:
            self.why_broken = why
        elif not self._ranks.forward_is_shared:  # together they measure again
            self._refused[kind] = why

    @contextmanager
    def _compare(
        self, lent: samples.Probe, loss: Loss, scale: float, put_back: Callable[[], object]
    ) -> Iterator[Comparison]:
        model, state = self._ranks.bare, self.full_state()
        parameters = small_parameters(model) if self._is_trained else list(model.parameters())
        with (
            gradients_aside(model),
            frozen(set(model.parameters()) - set(parameters)),
            Watch(model) as watch,
            replace_reentry(model),
            HeldAt(),
            Drawers(model) as drawers,
        ):
            passes = (loss, scale, parameters, watch, state, drawers, put_back)
            try:
                yield Comparison(self._ranks, self._family.weights, lent, *passes)
            finally:
                state.restore()

    def _judge(self, comparison: Comparison, told: list[Measurement], is_new: bool) -> list[Weight]:
        """Return the weights that fit, the same on all ranks."""
        if not told:
            if self._ranks.on_any(is_new):
                raise IndivisibleError(comparison.why_inconclusive)
            return []
        for one in told:
            if self._ranks.on_any(not one.is_additive):
                raise NotAdditiveError(comparison.describe(one))
        remaining = [w for w in comparison.weights if all(one.fits(w) for one in told)]
        if self._ranks.on_any(not remaining):
            raise NotAdditiveError(comparison.describe(told[-1]))
        if comparison.why_moved:
            raise NotAdditiveError(comparison.why_moved)
        return remaining

    def _measure(
        self, comparison: Comparison, layout: Layout, inputs: Inputs, num_fit: int
    ) -> list[Measurement]:
        is_gradient, is_vouched = self._is_trained, self._family.is_vouched
        is_first = self._ranks.on_any(not self.knows(layout))
        halves = samples.real(layout, inputs, num_fit, comparison.weights, varies_labels=is_vouched)
        told = comparison.first_conclusive(halves, is_gradient=is_gradient)
        self.did_not_fit = [(one.num, cells(one.whole)) for one in comparison.did_not_fit]
        found = [told]
        if is_first or told is None:  # constructed so that the weights differ most
            cut = samples.short(layout, inputs)
            found.append(comparison.first_conclusive(cut, is_gradient=is_gradient))
        if is_gradient:
            found.append(self._measure_all(comparison, layout, inputs, num_fit))
        found.extend(self._measure_classes(comparison, layout, inputs))
        return [one for one in found if one is not None]

    def _measure_all(
        self, comparison: Comparison, layout: Layout, inputs: Inputs, num_fit: int
    ) -> Measurement | None:
        """Measure all rows at once: cut short, or by the loss alone, which keeps no activations."""
        if not self._ranks.on_any(layout.count(inputs) > max(num_fit, SHORT[0])):
            return None  # others had as many
        sample = samples.all_rows(layout, inputs)
        if self._ranks.on_any(cells(sample.whole) < cells(inputs)):
            told = comparison.first_conclusive([sample], is_gradient=True)
            if told is not None:
                return told
        if self._ranks.forward_is_shared:
            return None
        told = comparison.first_conclusive([sample], is_gradient=False)
        if told is not None and not told.is_additive:
            few = samples.real(layout, inputs, num_fit, comparison.weights)
            small = comparison.first_conclusive(few, is_gradient=False)
            if small is None or not small.is_additive:
                return None  # the loss has a term without a gradient
        return told

    def _measure_classes(
        self, comparison: Comparison, layout: Layout, inputs: Inputs
    ) -> Iterator[Measurement]:
        pairs = samples.pair_classes(layout, inputs, self.new_classes(inputs))
        for place in range(self._ranks.highest(len(pairs))):
            pair = pairs[place : place + 1]
            told = comparison.first_conclusive(pair, is_gradient=self._is_trained)
            if told is None:
                raise IndivisibleError(comparison.why_inconclusive)
            yield told


def _describe_known(told: list[Measurement]) -> str:
    by_how: dict[str, list[str]] = {}
    for one in told:
        by_how.setdefault(one.how, []).append(one.sample.words)
    measured = [f"{_list_samples(words)}, {how}" for how, words in by_how.items()]
    return f"pieces add up, measured on {'; on '.join(measured)}"


def _list_samples(words: list[str]) -> str:
    # At most three samples show no label of their own.
    more = [f"for {len(words) - 4} more labels"] if words[4:] else []
    return " and ".join([*words[:4], *more])


def batch_kind(layout: Layout, inputs: Inputs) -> Kind:
    """Describe a batch by its tensors, and by whether all of it is labelled; reads the device."""
    tensors: list[tuple[str, torch.dtype, int, bool]] = []
    for name, value in sorted(inputs.items()):
        if torch.is_tensor(value):
            has_gaps = name.endswith("mask") and bool((value == 0).any())
            has_gaps |= name.endswith("labels") and bool((value == IGNORED).any())
            tensors.append((name, value.dtype, value.dim(), has_gaps))
    return layout.unit, tuple(tensors)
