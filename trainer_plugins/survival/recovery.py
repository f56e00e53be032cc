"""Recovery: finish one micro-batch, piece by piece, and say how it went."""

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from trainer_plugins.survival.attempt import DidNotFit
from trainer_plugins.survival.baseline import leftover
from trainer_plugins.survival.certificate import certify
from trainer_plugins.survival.finality import what_is_never_final
from trainer_plugins.survival.layouts import TOKEN_IDS, IndivisibleError, Inputs, Layout, find_layout
from trainer_plugins.survival.limit import lower, sizes
from trainer_plugins.survival.marks import frozen
from trainer_plugins.survival.micro_batch import MicroBatch, Piece, Start
from trainer_plugins.survival.run import Run
from trainer_plugins.survival.weights import Weight
from trainer_plugins.survival.words import Story


class Recovery:
    """Of one micro-batch."""

    def __init__(self, run: Run, micro: MicroBatch, **options: Any) -> None:
        self._run, self._attached, self._micro, self._options = run, run.attached, micro, options
        self._story = Story()
        self._phase = ""
        self._layout: Layout | None = None
        self._why_whole = ""
        self._num_pieces = 1
        try:
            self._layout = find_layout(run.attached.family.layouts, micro.whole.inputs)
        except IndivisibleError as error:
            self._why_whole = str(error)
        micro.whole.num = self._layout.count(micro.whole.inputs) if self._layout else 1

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
        """Put back what a failed attempt has moved, note which gradients it finished, and see to it that less is tried.

        Args:
            piece: what was tried.
            start: the moment before.
            failure: how it failed.
            phase: in its "forward" or its "backward".
            is_last: whether no piece would have come after it.
            why_not: what speaks against going on, as seen from outside.

        Raises:
            torch.OutOfMemoryError: there is nothing smaller to try.
        """
        changed = start.mark.changed()
        why_not = self._run.ranks.failed(phase, is_last, changed) or why_not
        self._story.failures.append(failure)
        self._story.tried = self._story.tried or f"{self._what(piece)} did not fit in the {phase} pass"
        if not why_not and self._run.has_exchanged_parameters():
            why_not = "the model has other parameters than when training began, and their gradients were not watched"
        if why_not:
            self._give_up(why_not)
        start.snapshot.restore()
        self._look_for_leftover(start)
        self._make_room(piece)
        if changed:
            self._check_finality()
            piece.final |= changed

    def plan(self) -> int:
        """Into how many pieces the micro-batch is divided beforehand, here and on every rank that keeps step."""
        whole = self._micro.whole
        cuts = sizes(whole.num, whole.num_cells, self._run.memo.limit, self._attached.min_micro_batch)
        self._num_pieces = self._run.ranks.highest(len(cuts) if self._layout else 1)
        return self._num_pieces

    def measure(self) -> None:
        """Measure by which weights pieces add up. Ranks that keep step do it together, before the first division.

        Raises:
            IndivisibleError: there are none, or nothing to measure with.
        """
        num = self._micro.whole.num if self._layout else 0
        if -self._run.ranks.highest(-num) < 2 or self._layout is None:
            raise IndivisibleError(self._why_whole or "it takes two examples on each rank to measure that they add up")
        self._weight(self._layout)

    def finish(self) -> torch.Tensor:
        """Forward and backward of every piece. Returns the loss of the micro-batch, without a graph."""
        total: torch.Tensor | None = None
        queue = deque(self._in_step() if self._run.ranks.in_step else [self._micro.whole])
        while queue:
            piece = queue.popleft()
            parts = self._cut(piece)
            if parts[0] is not piece:
                queue.extendleft(reversed(parts))
                continue
            start = self._run.start()
            loss = self._run.ranks.attempt(partial(self._compute, piece, not queue))
            if isinstance(loss, DidNotFit):
                self.failed(piece, start, loss, self._phase, is_last=not queue)
                queue.appendleft(piece)
                continue
            total = loss if total is None else total + loss
            self._story.pieces.append(piece.num)
            if self._run.memo.pace is not None:
                self._run.memo.pace.computed(piece.num_cells, piece is not self._micro.whole)
            if queue:
                self._micro.start.snapshot.restore_metrics()  # those of the last one are those of the whole
        self._run.ranks.finished()
        if self._story.failures:
            self._run.memo.num_survived += 1
            self._run.say(
                self._story.survived(self._what(self._micro.whole), self._count(max(self._story.pieces)), self._limit())
            )
        assert total is not None
        return total

    def _give_up(self, why: str) -> NoReturn:
        """Say why, and let the error of the first attempt go on."""
        self._run.say(self._story.refused(self._what(self._micro.whole), why))
        raise self._story.failures[0].as_error(why)

    def _compute(self, piece: Piece, is_last: bool) -> torch.Tensor:
        """Forward and backward of a piece, as the Trainer would do them."""
        self._phase = "forward"
        run = self._run
        # Frozen first: what stands in for the parameters (`ddp.py`) is to be frozen alike.
        with frozen(piece.final), run.ranks.piece(is_last) as model, run.gathers.piece(piece.share, is_last):
            loss = self._loss(piece.inputs, model)
            self._phase = "backward"
            if loss.requires_grad:  # not where every gradient is final
                scaled = loss * (piece.factor * self._micro.scale)
                self._attached.backward(scaled, **{**self._run.ranks.options, **self._options})
        return loss.detach() * piece.factor

    def _in_step(self) -> list[Piece]:
        """As many pieces as every other rank has; what is missing of them is computed twice, and counts nothing."""
        whole, num, pieces = self._micro.whole, self._num_pieces, [self._micro.whole]
        cuts = [whole.num * (part + 1) // num - whole.num * part // num for part in range(num)]
        # What was not measured together, at the first micro-batch, one rank must not measure: it is computed as it is.
        if self._layout is not None and self._layout.name in self._run.weights:
            with suppress(IndivisibleError):
                weight, share = self._weight(self._layout), self._attached.family.share
                pieces = whole.parts(self._layout, [cut for cut in cuts if cut], weight, share)
        least = min(pieces, key=lambda piece: piece.num_cells)
        return [*(Piece(least.inputs, least.num, 0.0, 0.0) for _ in range(num - len(pieces))), *pieces]

    def _cut(self, piece: Piece) -> list[Piece]:
        if self._run.ranks.in_step:
            return [piece]
        try:
            return self._divide(piece, self._run.ranks.agreed(self._run.memo.limit))
        except IndivisibleError:
            return [piece]  # the limit is that of another micro-batch: what cannot be divided is tried as it is

    def _divide(self, piece: Piece, limit: float) -> list[Piece]:
        cuts = sizes(piece.num, piece.num_cells, limit, self._attached.min_micro_batch)
        if len(cuts) == 1 or self._layout is None:
            return [piece]
        return piece.parts(self._layout, cuts, self._weight(self._layout), self._attached.family.share)

    def _make_room(self, piece: Piece) -> None:
        """Lower the limit; where the piece cannot be divided, switch something on; where there is nothing, give up."""
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
        self._give_up(why or f"there is nothing smaller to try than {self._what(piece)}, and nothing left to switch on")

    def _check_finality(self) -> None:
        """Measured once a run: whether the gradients that have changed are those of the whole pass."""
        run, inputs = self._run, self._micro.whole.inputs
        if run.is_final:
            return
        probe = self._layout.probe(inputs, 1) if self._layout else inputs
        with self._measuring():
            why = what_is_never_final(run.model, partial(self._loss, probe, run.model))
        if why:
            self._give_up(why)
        run.is_final = True

    def _weight(self, layout: Layout) -> Weight:
        """By which pieces add up; measured once a run."""
        run, attached = self._run, self._attached
        if layout.name not in run.weights:
            loss = partial(self._loss, model=run.model)
            with self._measuring():
                run.weights[layout.name] = certify(
                    attached.trainer, run.model, attached.family, layout, self._micro.whole.inputs, loss
                )
        if run.what_moved:
            raise IndivisibleError(run.what_moved)
        return run.weights[layout.name]

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """What a measurement draws and counts is put back, and it reaches no other rank."""
        before = self._run.start().snapshot
        try:
            with self._run.gathers.measuring():
                yield
        finally:
            before.restore()
            self._run.ranks.forget()

    def _loss(self, inputs: Inputs, model: nn.Module) -> torch.Tensor:
        """Within what the Trainer has around its own call: in the backward of a micro-batch that is left already."""
        with self._attached.trainer.compute_loss_context_manager():
            return self._run.compute_loss(model, inputs, self._micro.num_items)

    def _look_for_leftover(self, start: Start) -> None:
        if self._run.card is None or self._run.leftover_is_said:
            return
        with self._run.memo.harmless():
            expected_bytes = start.allocated_bytes + start.mark.new_bytes()
            finding = leftover(self._run.card, expected_bytes, self._run.model, self._attached.trainer.optimizer)
            if finding is not None:
                self._run.leftover_is_said = True
                self._run.say(finding)

    def _count(self, num: int) -> str:
        unit = self._layout.unit if self._layout else "examples"
        return f"{num} {unit}" if num != 1 else f"1 {unit[:-1]}"

    def _what(self, piece: Piece) -> str:
        has_tokens = any(name.endswith(TOKEN_IDS) for name in piece.inputs)
        return self._count(piece.num) + (f" ({piece.num_cells} tokens, padding included)" if has_tokens else "")

    def _limit(self) -> str:
        whole, limit = self._micro.whole, self._run.memo.limit
        if math.isinf(limit):
            return "open again"
        num_fit = max(1, int(limit / (whole.num_cells / whole.num) + 1e-6))
        return f"{self._count(num_fit)} of this length at once"
