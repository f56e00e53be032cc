"""Replay: recovery on ranks that compute their whole window again, in equally many pieces.

A window is the micro-batches of one optimizer step. If one rank fails, the gradients of the
micro-batches before are thrown away with those of the failure: a sum to which one rank brought
nothing cannot be told from a good one. So no parameter is frozen, and all of them see the same
dropout masks.

Every decision is one of all ranks: each asks the same questions (`ranks.highest`) in the same
order, whatever it holds.
"""

import math
from dataclasses import replace
from functools import partial

import torch

from trainer_plugins.survival.attempt.attempt import DidNotFit, DidNotFitElsewhere
from trainer_plugins.survival.exact.layouts import IndivisibleError
from trainer_plugins.survival.limit.limit import even, lower
from trainer_plugins.survival.micro_batch import MicroBatch, Piece, Start
from trainer_plugins.survival.ranks.protocol import Window
from trainer_plugins.survival.training.planned import Planned
from trainer_plugins.survival.training_run import TrainingRun


class Replay(Planned):
    """Finishes one micro-batch, and computes again those before it in its window."""

    def __init__(self, run: TrainingRun, micro: MicroBatch, **options: object) -> None:
        super().__init__(run, micro, **options)
        self._ranks = run.ranks
        self._total: torch.Tensor | None = None

    @property
    def _window(self) -> Window:
        window = self._ranks.window
        assert window is not None  # ranks that recover so have one
        return window

    def _at_stake(self) -> list[MicroBatch]:
        return self._window.micros

    def failed(
        self,
        piece: Piece,
        start: Start,
        failure: DidNotFit,
        phase: str,
        *,
        is_last: bool = True,
        why_not: str = "",
    ) -> None:
        """Undo a failed attempt on every rank; `piece` is what this rank tried meanwhile."""
        is_here = not isinstance(failure, DidNotFitElsewhere)
        self._story.failures.append(failure)
        self._tried += [piece.num] if is_here else []
        what = f"{self._what(piece)} did not fit in the {phase} pass"
        self._story.tried = self._story.tried or (
            what if is_here else "what another rank computed did not fit"
        )
        if self._run.has_exchanged_parameters():
            why_not = why_not or "the model has other parameters than when training began"
        self._agree_to_go_on(why_not or self._why_whole)
        self._window.clear()
        self._look_for_leftover(self._window.micros[0].start)
        self._make_room_for(piece if is_here else None)

    def measure(self) -> None:
        """Do nothing yet: `finish` measures when it has to, and a rank may have one example now."""

    def finish(self) -> torch.Tensor:
        """Run forward and backward of every piece, of the whole window if need be.

        Returns:
            The loss of the micro-batch, without a graph.
        """
        before = self._window.micros[:-1]
        window = [*(type(self)(self._run, micro, **self._options) for micro in before), self]
        is_clear = bool(self._story.failures)
        if not is_clear and self._ranks.highest(any(micro._lacks_weight() for micro in window)):
            self._window.clear()  # to measure takes the place that gradients have
            is_clear = True
        todo = window if is_clear else [self]
        while not self._compute_all(todo, may_measure=is_clear):
            is_clear, todo = True, window
        self._tell()
        assert self._total is not None
        return self._total

    def _compute_all(self, todo: list["Replay"], *, may_measure: bool) -> bool:
        """Compute all of these, as if nothing had been computed yet.

        Returns:
            Whether everything fitted. If not, it has to be begun again, with smaller pieces.
        """
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
            replay._total, replay._story.pieces = None, []
            for number, piece in enumerate(replay._pieces(num)):
                if number:
                    replay._micro.start.snapshot.state.restore()
                loss = self._ranks.attempt(partial(replay._compute, piece, True))
                if isinstance(loss, DidNotFit):
                    self.failed(piece, replay._micro.start, loss, replay._phase)
                    return False
                replay._look_at_state(piece, replay._micro.start, is_last=True)
                replay._total = loss if replay._total is None else replay._total + loss
                replay._story.pieces.append(piece.num)
                replay._count_computed(piece)
        return True

    def _pieces(self, num: int) -> list[Piece]:
        """Return so many pieces. A rank that cannot make so many adds some that count as 0."""
        whole, smallest = self._micro.whole, self._attached.min_micro_batch
        cuts = even(whole.num, max(1, min(num, whole.num // smallest)))
        parts = [whole]
        if len(cuts) > 1 and self._layout is not None:
            parts = whole.parts(
                self._layout,
                cuts,
                self._weight(self._layout, max(cuts)),
                self._attached.family.share,
            )
        idle = replace(min(parts, key=lambda piece: piece.num_cells), factor=0.0, share=0.0)
        return parts + [idle] * (num - len(parts))

    def _make_room_for(self, piece: Piece | None) -> None:
        """Lower the limit, or switch something on.

        Args:
            piece: what did not fit; None if that was on another rank.
        """
        memo, limit, why = self._run.memo, None, ""
        if piece is None:
            limit = memo.limit
        elif (
            limit := lower(piece.num, piece.num_cells, memo.limit, self._attached.min_micro_batch)
        ) is None:
            why = self._nothing_left(piece)
        if not self._ranks.highest(limit is None):
            assert limit is not None
            try:
                self._weigh([self], limit)
            except IndivisibleError as error:  # on every rank
                why = str(error)
            else:
                memo.limit = self._ranks.agreed(limit)
                return
        if rung := memo.climb(self._attached.ladder, self._run.model):
            self._story.switched_on.append(rung)
            return
        self._give_up(
            why or "another rank has nothing smaller to try, and there is nothing left to switch on"
        )

    def _lacks_weight(self) -> bool:
        """Tell whether this rank wants a measurement.

        One that is merely due waits until a window begins: no gradient is lost then.
        """
        certificate = self._run.certificate
        if self._layout is None or self._micro.whole.num < 2:
            return False
        is_first, inputs = self._micro is self._window.micros[0], self._micro.whole.inputs
        return certificate.is_new(self._kind, inputs) or (
            is_first and certificate.wants(self._kind, inputs)
        )

    def _weigh(self, replays: list["Replay"], limit: float = math.inf) -> None:
        """Measure by which weights pieces add up, if one rank does not know it.

        Call it only when there is no gradient to lose.
        """
        if self._run.certificate.why_broken:  # on every rank
            raise IndivisibleError(self._run.certificate.why_broken)
        why = self._run.what_moved
        if self._ranks.highest(bool(why)):
            raise IndivisibleError(why or "the loss of another rank is its user's own")
        for replay in replays:
            if not self._ranks.highest(replay._lacks_weight()):
                continue
            if self._ranks.highest(replay._layout is None) or replay._layout is None:
                raise IndivisibleError(
                    replay._why_whole or "a micro-batch of another rank cannot be divided"
                )
            replay._measure(replay._layout, replay._num_fit(limit))

    def _agree_to_go_on(self, why_not: str) -> None:
        if self._ranks.highest(bool(why_not)):
            self._give_up(why_not or "another rank cannot go on, and says why")
