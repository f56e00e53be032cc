"""Certificate: by which weights the pieces of a run add up, measured on rows of the run, and again as it goes on.

A piece of the size that pieces will have is held against its halves, in the mode in which the model
trains, with the drawing of random numbers held (`held.py`). The first time, and for each new kind
of batch, it is the gradient; later the loss alone, and the gradient where that does not tell.
Necessary, and no proof: that is the list in `losses.py`.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer

from trainer_plugins.survival.attempt.marks import frozen
from trainer_plugins.survival.certificate.comparison import Comparison, Loss, Told, steady
from trainer_plugins.survival.certificate.samples import idle, real, short
from trainer_plugins.survival.exact.finality import Watch, gradients_aside, small_parameters
from trainer_plugins.survival.exact.layouts import IGNORED, IndivisibleError, Inputs, Layout
from trainer_plugins.survival.exact.losses import Family
from trainer_plugins.survival.exact.shares import Weight
from trainer_plugins.survival.limit.limit import cells
from trainer_plugins.survival.ranks.alone import Alone

logger = logging.getLogger(__name__)

_SPARING = 300
"""So many times what a check costs is computed in pieces before the next: a third of a percent."""

Kind = tuple[Any, ...]


class Certificate:
    """Of one run, or of its evaluations.

    Args:
        trainer: whose run it is.
        ranks: those that have to measure together.
        family: the weights that come into question.
        is_trained: whether gradients are summed, and not losses alone.
    """

    def __init__(
        self, trainer: Trainer, ranks: Alone, family: Family, *, is_trained: bool = True
    ) -> None:
        self._trainer, self._ranks, self._family, self._is_trained = (
            trainer,
            ranks,
            family,
            is_trained,
        )
        self._weights: dict[str, list[Weight]] = {}
        """Those that have fitted every sample so far, by the name of the layout."""
        self._kinds: set[Kind] = set()
        self._refused: dict[Kind, str] = {}
        """Why not, where it was measured."""
        self._computed = self._next = 0.0
        self.why_broken = ""
        """Why nothing is divided any more: a measurement failed after something was."""
        self.known = ""
        """What the last measurement was made on, and what it found."""
        self.unchecked_since: int | None = None
        """The first step that was divided since the last measurement."""

    def weight(self, layout: Layout, kind: Kind) -> Weight:
        """By which pieces of a micro-batch of this kind add up.

        Raises:
            IndivisibleError: they do not, or it was not measured.
        """
        why = self.why_broken or self._refused.get(kind, "")
        if why or not self.knows(layout):
            raise IndivisibleError(why or "whether its parts add up was not measured")
        return self._weights[layout.name][0]

    def knows(self, layout: Layout) -> bool:
        """Whether anything was measured of examples that lie so."""
        return layout.name in self._weights

    def wants(self, kind: Kind) -> bool:
        """Whether a micro-batch of this kind is to be measured before it is divided: it is new, or it is time."""
        return self.is_new(kind) or (
            not self.why_broken and kind in self._kinds and self._computed >= self._next
        )

    def is_new(self, kind: Kind) -> bool:
        """Whether no micro-batch of this kind was measured yet."""
        return not self.why_broken and kind not in self._kinds and kind not in self._refused

    def computed(self, num_cells: int, step: int) -> None:
        """So much of a divided micro-batch was computed."""
        self._computed += num_cells
        if self.unchecked_since is None:
            self.unchecked_since = step

    def measure(
        self,
        layout: Layout,
        inputs: Inputs,
        num_fit: int,
        loss: Loss,
        put_back: Callable[[], object],
    ) -> None:
        """Find out by which weights pieces add up.

        Every rank that computes in step comes here at once.

        A rank without two examples lends itself to the others. Where these measure gradients there
        must be none yet.

        Args:
            layout: of the inputs.
            inputs: a micro-batch of the run.
            num_fit: how many of its examples are computed at once, at most.
            loss: of some of its examples.
            put_back: takes random numbers and metrics back to where they were.

        Raises:
            IndivisibleError: no weight fits, a part cannot be computed, or there was no room to
                measure.
        """
        kind, family = kind_of(layout, inputs), self._family.for_inputs(inputs)
        known = [
            one for one in self._weights.get(layout.name) or family.weights if one in family.weights
        ]
        model = self._ranks.bare
        parameters = small_parameters(model) if self._is_trained else list(model.parameters())
        unwatched = set(model.parameters()) - set(parameters)
        try:
            with (
                gradients_aside(model),
                frozen(unwatched),
                Watch(model) as watch,
                steady(model, put_back) as passes,
            ):
                comparison = Comparison(
                    self._trainer, self._ranks, family, loss, parameters, watch, passes
                )
                told = self._told(comparison, layout, kind, inputs, num_fit, known)
                if not told and not self._ranks.highest(int(kind not in self._kinds)):
                    self._next = self._computed + _SPARING * (comparison.cost or cells(inputs))
                    return  # nothing new: what is known holds
                if not told:
                    raise IndivisibleError(comparison.why_untold)
                for one in told:
                    if self._ranks.highest(int(not _fitting(known, [one]))):
                        raise _NotAdditiveError(comparison.said(one))
                remaining = _fitting(known, told)
                if self._ranks.highest(int(not remaining)):
                    raise _NotAdditiveError(comparison.said(told[-1]))
        except _NotAdditiveError as error:
            if self.unchecked_since is not None:
                self.why_broken = str(error)
            elif (
                not self._ranks.in_step
            ):  # where they decide together, they measure together once more
                self._refused[kind] = str(error)
            raise
        # The gradient of a new kind is measured once. What comes again, the loss alone, costs a
        # third of it.
        cost = (
            comparison.cost / 3
            if kind not in self._kinds and not self._ranks.in_step
            else comparison.cost
        )
        self._next, self.unchecked_since = self._computed + _SPARING * cost, None
        if layout.count(inputs) < 2:
            return  # it was lent, and shows nothing of its own
        self._weights[layout.name] = remaining
        self._kinds.add(kind)
        self.known = f"it adds up, measured on {', and on '.join(one.words for one in told)}"
        logger.info("%s", self.known)

    def _told(
        self,
        comparison: Comparison,
        layout: Layout,
        kind: Kind,
        inputs: Inputs,
        num_fit: int,
        known: list[Weight],
    ) -> list[Told]:
        """What samples of a micro-batch show; nothing where none fits, or has something to show."""
        is_gradient = self._is_trained and (self._ranks.in_step or kind not in self._kinds)
        is_first = self._ranks.highest(int(not self.knows(layout)))
        samples = real(layout, inputs, num_fit, known)
        lent = idle(layout, inputs)
        told = comparison.first_that_tells(samples, lent, is_gradient=is_gradient)
        if self._is_trained and not is_gradient and not (told and _fitting(known, [told])):
            is_gradient = True  # which decides: a loss may have a term without a gradient
            told = comparison.first_that_tells(samples, lent, is_gradient=True)
        if told is not None and not is_first:
            return [told]
        # Made so that the weights differ most.
        cut = comparison.first_that_tells(short(layout, inputs), lent, is_gradient=is_gradient)
        return [one for one in (told, cut) if one is not None]


def _fitting(known: list[Weight], told: list[Told]) -> list[Weight]:
    """Those of the weights known so far that fit all samples."""
    return [weight for weight in known if all(one.errors[weight] <= one.tolerance for one in told)]


class _NotAdditiveError(IndivisibleError):
    """It was measured, and does not add up."""


def kind_of(layout: Layout, inputs: Inputs) -> Kind:
    """What makes a batch another kind of batch: names, types, dimensions; and whether all is attended, and labelled.

    Reads a device: for micro-batches that are divided.
    """
    kind: list[Any] = [layout.name]
    for name, value in sorted(inputs.items()):
        if torch.is_tensor(value):
            has_gaps = name.endswith("mask") and bool((value == 0).any())
            has_gaps |= name.endswith("labels") and bool((value == IGNORED).any())
            kind.append((name, value.dtype, value.dim(), has_gaps))
    return tuple(kind)
