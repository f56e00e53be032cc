"""PlannedPieces: recovery on ranks that divide together, into equally many pieces.

It divides before a micro-batch is computed. `Replay` computes a window (the micro-batches of one
optimizer step) again: a failure spoils its sums, so no parameter is frozen. Each rank asks the same
questions (`ranks.highest`) in the same order, whatever its rows.
"""

import math
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NoReturn

import torch

from trainer_plugins.survival.attempt.attempt import DidNotFit
from trainer_plugins.survival.exact.shares import IndivisibleError, Inputs, NumItems
from trainer_plugins.survival.limit.limit import even
from trainer_plugins.survival.micro_batch import MicroBatch, Piece, Start
from trainer_plugins.survival.training.recovery import Recovery
from trainer_plugins.survival.training_run import TrainingRun
from trainer_plugins.survival.words import part_raised, report_not_attached


class PlannedPieces(Recovery):
    """Finishes a micro-batch in equally many pieces on all ranks; a failing piece ends the run."""

    _num_pieces = 1

    @classmethod
    def begin_run(cls, run: TrainingRun, inputs: Inputs, num_items: NumItems) -> None:
        """Give all ranks one limit, which does not grow; if it is finite, measure the weights."""
        run.memo.pace = None
        if run.is_refused:
            return
        run.memo.limit = run.ranks.agree(run.memo.limit)
        if math.isinf(run.memo.limit):
            return
        why, first = "", MicroBatch(Piece(dict(inputs), 1), num_items, 1.0, run.start())
        recovery = cls(run, first)
        try:
            recovery.measure()
        except IndivisibleError as error:
            why = str(error)
        if run.ranks.on_any(bool(why)):
            run.memo.limit = math.inf
            why = why or "those of another rank cannot"
            run.attached.say(report_not_attached([f"micro-batches cannot be split: {why}"]))

    def measure(self) -> None:
        num = self._micro.whole.num if self._layout else 0
        if self._ranks.lowest(num) < 2 or self._layout is None:
            raise IndivisibleError(
                self._why_whole
                or "measuring whether pieces add up takes at least two examples on each rank"
            )
        self._weight(self._layout, self._num_fit())

    def _num_fit(self, limit: float = math.inf) -> int:
        return max(self._cuts(self._micro.whole, min(limit, self._run.memo.limit)))

    def plan(self) -> int:
        self._num_pieces = self._ranks.highest(super().plan())
        return self._num_pieces

    def _first_pieces(self) -> list[Piece]:
        # What was not measured together, at the first micro-batch, is not divided.
        if not self._run.certificate.new_classes(self._micro.whole.inputs):
            with suppress(IndivisibleError):
                return self._pieces(self._num_pieces)
        return _fill([self._micro.whole], self._num_pieces)

    def _pieces(self, num: int) -> list[Piece]:
        """Return `num` pieces, padded with some that count as 0 if this rank makes fewer.

        This measures nothing: a measurement would overwrite the gradients of the window.
        """
        whole, smallest = self._micro.whole, self._attached.min_micro_batch
        cuts = even(whole.num, max(1, min(num, whole.num // smallest)))
        parts = [whole]
        if len(cuts) > 1 and self._layout is not None:
            weight = self._look_up_weight(self._layout)
            parts = whole.parts(self._layout, cuts, weight, self._attached.family.share)
        return _fill(parts, num)

    def _cut(self, piece: Piece) -> list[Piece]:
        return [piece]

    def _take_back(self, error: Exception) -> NoReturn:
        said = self._ranks.note_failure(self._phase, set())
        raise RuntimeError(f"survive_oom could not help: {part_raised(error)}; {said}") from error


class Replay(PlannedPieces):
    """Finishes a micro-batch, and recomputes those before it in its window."""

    _total: torch.Tensor | None = None

    def recover(self, piece: Piece, start: Start, failure: DidNotFit, phase: str) -> None:
        """Undo a failed attempt on every rank; `piece` is the one this rank tried meanwhile."""
        why_not = self._wrong_so_far() or self._why_whole
        self._story.note_failure(failure, piece, phase)
        if self._ranks.on_any(bool(why_not)):
            self._give_up(why_not or "another rank cannot continue, and logs why")
        self._ranks.clear()
        self._run.look_for_leftover(self._ranks.micros[0].start)
        self._make_room(piece if failure.is_here else None)

    def measure(self) -> None:
        """Do nothing: `finish` measures when necessary, and a rank may have one example now."""

    def finish(self) -> torch.Tensor:
        before = self._ranks.micros[:-1]
        window = [*(type(self)(self._run, micro, **self._options) for micro in before), self]
        is_clear = bool(self._story.failures)
        lacks = any(replay._lacks_weight(is_clear=False) for replay in window)
        if not is_clear and self._ranks.on_any(lacks):
            self._ranks.clear()  # a measurement overwrites the gradients
            is_clear = True
        todo = window if is_clear else [self]
        while not self._compute_all(todo, may_measure=is_clear):
            is_clear, todo = True, window
        self._tell()
        assert self._total is not None
        return self._total

    def _compute_all(self, todo: list["Replay"], *, may_measure: bool) -> bool:
        nums = [replay.plan() for replay in todo]
        if may_measure:
            try:
                self._weigh([replay for replay, num in zip(todo, nums, strict=True) if num > 1])
            except IndivisibleError as error:  # on every rank
                if self._story.failures:
                    self._give_up(str(error))
                self._run.memo.limit = math.inf  # it was known from before: try without
                return False
        for replay, num in zip(todo, nums, strict=True):
            replay._micro.start.snapshot.restore()
            self._run.gathers.begin()
            replay._total, replay._story.pieces = None, []
            for number, piece in enumerate(replay._pieces(num), 1):
                if number > 1:
                    replay._micro.start.snapshot.begin_next()
                loss = self._ranks.attempt(partial(replay._compute, piece, number == num))
                if isinstance(loss, DidNotFit):
                    self.recover(piece, replay._micro.start, loss, replay._phase)
                    return False
                replay._look_at_state(piece, replay._micro.start, is_last=True)
                replay._total = loss if replay._total is None else replay._total + loss
                replay._note_computed(piece)
        return True

    def _try_limit(self, piece: Piece | None, limit: float) -> None:
        self._weigh([self], limit)

    def _lacks_weight(self, *, is_clear: bool) -> bool:
        """Return whether this rank needs a measurement.

        If there are gradients to lose, one that is only due waits for the first of a window.
        """
        certificate, whole = self._run.certificate, self._micro.whole
        if self._layout is None or whole.num < 2:
            return False
        first = next(micro for micro in self._ranks.micros if micro.whole.num > 1)
        if is_clear or self._micro is first:
            return certificate.wants(self._kind, whole.inputs)
        return certificate.is_new(self._kind, whole.inputs)

    def _weigh(self, replays: list["Replay"], limit: float = math.inf) -> None:
        """Measure if a rank does not know the weights. There must be no gradients to lose."""
        if self._run.certificate.why_broken:  # on every rank
            raise IndivisibleError(self._run.certificate.why_broken)
        why = self._run.what_moved
        if self._ranks.on_any(bool(why)):
            raise IndivisibleError(why or "a loss of your own was computed on another rank")
        for replay in replays:
            if not self._ranks.on_any(replay._lacks_weight(is_clear=True)):
                continue
            if self._ranks.on_any(replay._layout is None) or replay._layout is None:
                raise IndivisibleError(
                    replay._why_whole or "a micro-batch of another rank cannot be split"
                )
            replay._measure(replay._layout, replay._num_fit(limit))


def _fill(pieces: list[Piece], num: int) -> list[Piece]:
    """Pad to `num` pieces, putting those that count as 0 first."""
    least = min(pieces, key=lambda piece: piece.num_cells)
    idle = replace(least, factor=0.0, share=0.0, is_idle=True)
    return [*[idle] * (num - len(pieces)), *pieces]
