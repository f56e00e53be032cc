"""Recovery: finish one micro-batch, piece by piece, and say how it went."""

import math
from collections import deque
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NoReturn

import torch
from torch import nn

from trainer_plugins.survival.attempt.attempt import DidNotFit
from trainer_plugins.survival.attempt.baseline import leftover
from trainer_plugins.survival.attempt.marks import frozen
from trainer_plugins.survival.attempt.restore_point import RestorePoint
from trainer_plugins.survival.exact.delegated import check_delegated
from trainer_plugins.survival.exact.finality import what_is_never_final
from trainer_plugins.survival.exact.layouts import IndivisibleError, Inputs
from trainer_plugins.survival.limit.ladder import is_checkpointing
from trainer_plugins.survival.limit.limit import lower, sizes
from trainer_plugins.survival.limit.pace import Pace
from trainer_plugins.survival.micro_batch import MicroBatch, Piece, Start
from trainer_plugins.survival.training.measured import Measured
from trainer_plugins.survival.training_run import TrainingRun
from trainer_plugins.survival.words import what_else


class Recovery(Measured):
    """Finishes one micro-batch on a rank that divides by itself.

    Args:
        run: the training.
        micro: the micro-batch.
        options: what the caller of `backward` passes besides the loss.
    """

    def __init__(self, run: TrainingRun, micro: MicroBatch, **options: object) -> None:
        super().__init__(run, micro)
        self._options, self._phase = options, ""
        self._added: list[tuple[Piece, RestorePoint, set[nn.Parameter] | None]] = []
        """Parts that have added to gradients, from which moment, and to which parameters.

        None stands for all parameters that were not final.
        """
        self._tried: list[int] = []
        """Numbers of examples of the failed attempts."""

    @classmethod
    def begin_run(
        cls, run: TrainingRun, inputs: Inputs, num_items: torch.Tensor | int | None
    ) -> None:
        """Prepare a run, at its first micro-batch: the limit follows this rank's own pace.

        A limit that a rehearsal found does not grow, unless it was lowered since.
        """
        ceiling = run.memo.limit if run.memo.is_rehearsed else math.inf
        reading = run.card.read() if run.card else None
        num_retries = reading.num_alloc_retries if reading else 0
        run.memo.pace = Pace(too_much=ceiling, ceiling=ceiling, num_retries=num_retries)

    @classmethod
    def may_divide(cls, run: TrainingRun, micro: MicroBatch) -> bool:
        """Tell whether a micro-batch may have to be divided before it is computed."""
        return micro.whole.num_cells > run.memo.limit

    def wrong_so_far(self) -> str:
        """Say whether `training_step` scaled one of the micro-batches otherwise than pieces are."""
        handed = (micro.handed for micro in self._at_stake())
        return next((wrong for one in handed if one is not None and (wrong := one.seen())), "")

    def _at_stake(self) -> list[MicroBatch]:
        """Return the micro-batches that are computed again after a failure."""
        return [self._micro]

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
        """Undo a failed attempt, and lower the limit, so that the next attempt is smaller.

        Gradients that it finished are noted, and stay.

        Args:
            piece: what was tried.
            start: the moment before.
            failure: how it failed.
            phase: whether that was in its "forward" or its "backward" pass.
            is_last: whether no piece would have come after it.
            why_not: the caller's reason to give up; empty if it has none.

        Raises:
            torch.OutOfMemoryError: there is nothing smaller to try.
        """
        changed = start.mark.changed()
        why_not = self._run.ranks.failed(phase, is_last, changed) or why_not
        self._story.failures.append(failure)
        self._tried.append(piece.num)
        self._story.tried = (
            self._story.tried or f"{self._what(piece)} did not fit in the {phase} pass"
        )
        if not why_not and self._run.has_exchanged_parameters():
            why_not = (
                "the model has other parameters than when training began, and their gradients "
                "were not watched"
            )
        if why_not:
            self._give_up(why_not)
        start.snapshot.restore()
        self._look_for_leftover(start)
        self._make_room(piece)
        if changed:
            self._check_finality()
            if piece is not self._micro.whole:
                self._added.append((piece, start.snapshot, changed))
            piece.final |= changed

    def plan(self) -> int:
        """Return into how many pieces the micro-batch is divided before it is computed."""
        whole, least = self._micro.whole, self._attached.min_micro_batch
        cuts = sizes(whole.num, whole.num_cells, self._run.memo.limit, least)
        return len(cuts) if self._layout else 1

    def finish(self) -> torch.Tensor:
        """Run forward and backward of every piece.

        Returns:
            The loss of the micro-batch, without a graph.
        """
        total: torch.Tensor | None = None
        queue = deque(self._first_pieces())
        while queue:
            piece = queue.popleft()
            parts = self._cut(piece)
            if parts[0] is not piece:
                queue.extendleft(reversed(parts))
                continue
            start = self._run.start()
            try:
                loss = self._run.ranks.attempt(partial(self._compute, piece, not queue))
                if not isinstance(loss, DidNotFit):
                    self._look_at_state(piece, start, is_last=not queue)
            except Exception as error:
                if piece is self._micro.whole:
                    raise
                self._added.append((piece, start.snapshot, start.mark.changed()))
                self._take_back(error)
                queue, total = deque([self._micro.whole]), None
                continue
            if isinstance(loss, DidNotFit):
                self.failed(piece, start, loss, self._phase, is_last=not queue)
                queue.appendleft(piece)
                continue
            self._added.append((replace(piece, final=set(piece.final)), start.snapshot, None))
            total = loss if total is None else total + loss
            self._story.pieces.append(piece.num)
            if self._run.memo.pace is not None:
                self._run.memo.pace.computed(piece.num_cells, piece is not self._micro.whole)
            self._count_computed(piece)
            if queue:  # the metrics of the last piece are those of the whole
                self._micro.start.snapshot.begin_next()
        self._run.ranks.finished()
        self._tell()
        assert total is not None
        return total

    def _tell(self) -> None:
        """Report each micro-batch that failed before, and the first one that is divided."""
        run, story = self._run, self._story
        run.memo.num_divided += len(story.pieces) > 1
        if self._attached.family.is_vouched and self._layout is not None and len(story.pieces) > 1:
            # A later look at the same micro-batch may have found otherwise.
            with suppress(IndivisibleError):
                story.loss = run.certificate.weight(self._layout, self._kind).name
        told = self._what(self._micro.whole), self._count(max(story.pieces)), self._limit()
        if story.failures:
            run.memo.num_survived += 1
            run.say(story.survived(*told))
        elif len(story.pieces) > 1 and not run.is_division_said:
            run.say(story.divided(*told))
        run.is_division_said |= len(story.pieces) > 1

    def _take_back(self, error: Exception) -> None:
        """Undo every part after one raised an error of its own, as if none had been tried.

        That happens with images that are not spread evenly over rows, for one. What parts have
        added to gradients is computed once more, from the same random numbers, and subtracted.

        Raises:
            RuntimeError: what was added does not fit once more.
        """
        self._why_whole = part_raised(error)
        everything = set(self._run.model.parameters())
        for piece, snapshot, added in self._added:
            if added is None or added:
                snapshot.restore()
                final = piece.final if added is None else everything - added
                undone = self._run.ranks.attempt(
                    partial(self._compute, replace(piece, factor=-piece.factor, final=final), False)
                )
                if isinstance(undone, DidNotFit):
                    raise RuntimeError(
                        f"survive_oom could not help: {self._why_whole}; {undone.words}"
                    ) from error
        self._added.clear()
        self._story.pieces.clear()
        self._run.gathers.forget_pieces()
        self._layout = None
        self._micro.start.snapshot.restore()

    def _give_up(self, why: str) -> NoReturn:
        """Say why nothing more can be done, and raise the error of the first attempt."""
        num_rows = self._attached.trainer.args.per_device_train_batch_size
        least = min(self._tried, default=1)
        remedy = what_else(
            is_divisible=num_rows > 1 and (self._layout is None or least > 1),
            is_checkpointing=is_checkpointing(self._run.model),
        )
        self._run.say(self._story.refused(self._what(self._micro.whole), why, remedy))
        raise self._story.failures[0].as_error(why)

    def _compute(self, piece: Piece, is_last: bool) -> torch.Tensor:
        """Run forward and backward of a piece, as the Trainer would do it."""
        self._phase = "forward"
        run = self._run
        # Frozen first, so that the shadows of the parameters (`ddp.py`) are frozen too.
        with (
            frozen(piece.final),
            run.ranks.piece(is_last) as model,
            run.gathers.piece(piece.share, is_last),
        ):
            loss = self._loss(piece.inputs, model)
            if piece is not self._micro.whole:
                check_delegated(self._attached.compute_loss)
            self._phase = "backward"
            if loss.requires_grad:  # it does not if every gradient is final
                scaled = loss * (piece.factor * self._micro.scale)
                self._attached.backward(scaled, **{**self._run.ranks.options, **self._options})
        return loss.detach() * piece.factor

    def _first_pieces(self) -> list[Piece]:
        """Return what to begin with; `_cut` divides it as far as the limit asks for."""
        return [self._micro.whole]

    def _cut(self, piece: Piece) -> list[Piece]:
        try:
            return self._divide(piece, self._run.memo.limit)
        except IndivisibleError:  # the limit is that of another micro-batch: try this one as it is
            return [piece]

    def _divide(self, piece: Piece, limit: float) -> list[Piece]:
        cuts = sizes(piece.num, piece.num_cells, limit, self._attached.min_micro_batch)
        if len(cuts) == 1 or self._layout is None:
            return [piece]
        return piece.parts(
            self._layout, cuts, self._weight(self._layout, max(cuts)), self._attached.family.share
        )

    def _make_room(self, piece: Piece) -> None:
        """Lower the limit; if the piece cannot be divided, switch something on, or give up."""
        memo, why = self._run.memo, self._why_whole
        limit = lower(piece.num, piece.num_cells, memo.limit, self._attached.min_micro_batch)
        if memo.pace is not None and limit is not None:
            limit = memo.pace.failed(piece.num_cells, limit)
        if limit is not None and self._layout is not None:
            try:
                self._divide(piece, limit)
            except IndivisibleError as error:
                why = str(error)
            else:
                memo.limit = limit
                return
        if rung := memo.climb(self._attached.ladder, self._run.model):
            self._story.switched_on.append(rung)
            return
        self._give_up(why or self._nothing_left(piece))

    def _nothing_left(self, piece: Piece) -> str:
        """Say what was tried in vain, with what is switched on: ours, and the user's."""
        on = [
            *(["checkpointing"] if is_checkpointing(self._run.model) else []),
            *self._run.memo.rungs,
        ]
        tried = f" ({' and '.join(dict.fromkeys(on))} on)" if on else ""
        return (
            f"there is nothing smaller to try than {self._what(piece)}, and nothing left to switch "
            f"on{tried}"
        )

    def _check_finality(self) -> None:
        """Measure, once a run, whether a gradient that has changed is that of the whole pass."""
        run, inputs = self._run, self._micro.whole.inputs
        if run.is_final:
            return
        probe = self._layout.probe(inputs, 1) if self._layout else inputs
        with self._measuring():
            why = what_is_never_final(run.model, partial(self._loss, probe, run.model))
        if why:
            self._give_up(why)
        run.is_final = True

    def _look_for_leftover(self, start: Start) -> None:
        if self._run.card is None or self._run.leftover_is_said:
            return
        with self._run.memo.harmless():
            expected_bytes = start.allocated_bytes + start.mark.new_bytes()
            finding = leftover(
                self._run.card, expected_bytes, self._run.model, self._attached.trainer.optimizer
            )
            if finding is not None:
                self._run.leftover_is_said = True
                self._run.say(finding)


def part_raised(error: Exception) -> str:
    """Say that a part of a micro-batch raised an error of its own, or moved the model's state."""
    if isinstance(error, IndivisibleError):
        return str(error)
    return f"a part of it cannot be computed: {type(error).__name__}: {error}"
