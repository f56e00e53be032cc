"""Planned: recovery on ranks that divide alike, before a micro-batch is computed."""

import math
from contextlib import suppress
from typing import NoReturn

import torch

from trainer_plugins.survival.exact.layouts import IndivisibleError, Inputs
from trainer_plugins.survival.limit.limit import even
from trainer_plugins.survival.micro_batch import MicroBatch, Piece
from trainer_plugins.survival.training.recovery import Recovery, part_raised
from trainer_plugins.survival.training_run import TrainingRun
from trainer_plugins.survival.words import not_attached


class Planned(Recovery):
    """Finishes one micro-batch in as many pieces as every other rank computes.

    A piece that fails ends the run on all ranks (`ranks.failed`).
    """

    _num_pieces = 1

    @classmethod
    def begin_run(
        cls, run: TrainingRun, inputs: Inputs, num_items: torch.Tensor | int | None
    ) -> None:
        """Prepare a run, at its first micro-batch: all ranks have one limit, which does not grow.

        If there is a limit, they measure together by which weights pieces add up.
        """
        run.memo.pace = None
        if run.is_refused:
            return
        run.memo.limit = run.ranks.agreed(run.memo.limit)
        if math.isinf(run.memo.limit):
            return
        why, first = "", MicroBatch(Piece(dict(inputs), 1), num_items, 1.0, run.start())
        recovery = cls(run, first)
        try:
            recovery.measure()
        except IndivisibleError as error:
            why = str(error)
        if run.ranks.highest(int(bool(why))):
            run.memo.limit = math.inf
            why = why or "those of another rank cannot"
            run.say(not_attached([f"micro-batches cannot be divided: {why}"]))

    @classmethod
    def may_divide(cls, run: TrainingRun, micro: MicroBatch) -> bool:
        """Tell whether there is a limit: another rank's micro-batch may be larger."""
        return not math.isinf(run.memo.limit)

    def measure(self) -> None:
        """Measure by which weights pieces add up, together with all ranks.

        Raises:
            IndivisibleError: there are none, or nothing to measure with.
        """
        num = self._micro.whole.num if self._layout else 0
        if -self._run.ranks.highest(-num) < 2 or self._layout is None:
            raise IndivisibleError(
                self._why_whole or "it takes two examples on each rank to measure that they add up"
            )
        self._weight(self._layout, self._num_fit())

    def plan(self) -> int:
        """Return how many pieces each rank computes: as many as the rank that needs most."""
        self._num_pieces = self._run.ranks.highest(super().plan())
        return self._num_pieces

    def _first_pieces(self) -> list[Piece]:
        """Return as many pieces as every other rank has.

        A rank that cannot make so many computes its smallest piece again, and counts it as 0.
        """
        whole, num, pieces = self._micro.whole, self._num_pieces, [self._micro.whole]
        # What was not measured together, at the first micro-batch, one rank must not measure: it is
        # computed whole.
        known = self._layout is not None and self._run.certificate.knows(self._layout)
        if self._layout and known and not self._run.certificate.new_classes(whole.inputs):
            with suppress(IndivisibleError):
                weight = self._run.certificate.weight(self._layout, self._kind)
                cuts = [cut for cut in even(whole.num, num) if cut]
                pieces = whole.parts(self._layout, cuts, weight, self._attached.family.share)
        least = min(pieces, key=lambda piece: piece.num_cells)
        idle = [Piece(least.inputs, least.num, 0.0, 0.0) for _ in range(num - len(pieces))]
        return [*idle, *pieces]

    def _cut(self, piece: Piece) -> list[Piece]:
        """Return the piece as it is: another rank would not know of more."""
        return [piece]

    def _take_back(self, error: Exception) -> NoReturn:
        """End the run on all ranks: the others compute another part now.

        Raises:
            RuntimeError: always, with the reason.
        """
        said = self._run.ranks.failed(self._phase, False, set())
        raise RuntimeError(f"survive_oom could not help: {part_raised(error)}; {said}") from error
