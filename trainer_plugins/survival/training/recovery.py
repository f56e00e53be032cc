"""Recovery: finish one micro-batch, piece by piece, and say how it went."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
from torch import nn

from trainer_plugins.survival.attempt.attempt import DidNotFit
from trainer_plugins.survival.attempt.baseline import leftover
from trainer_plugins.survival.attempt.marks import frozen
from trainer_plugins.survival.attempt.snapshot import Snapshot
from trainer_plugins.survival.certificate.certificate import Kind, kind_of
from trainer_plugins.survival.exact.finality import what_is_never_final
from trainer_plugins.survival.exact.layouts import TOKEN_IDS, IndivisibleError, Inputs, Layout
from trainer_plugins.survival.exact.shares import Weight
from trainer_plugins.survival.limit.ladder import is_checkpointing
from trainer_plugins.survival.limit.limit import lower, num_that_fit, sizes
from trainer_plugins.survival.micro_batch import MicroBatch, Piece, Start
from trainer_plugins.survival.run import Run
from trainer_plugins.survival.words import Story, in_doubt, what_else


class Recovery:
    """Of one micro-batch."""

    def __init__(self, run: Run, micro: MicroBatch, **options: Any) -> None:
        self._run, self._attached, self._micro, self._options = run, run.attached, micro, options
        self._story = Story()
        self._phase = ""
        self._layout: Layout | None = None
        self._why_whole = ""
        self._added: list[tuple[Piece, Snapshot, set[nn.Parameter] | None]] = []
        """What parts have added to gradients: which, from which moment, to which parameters (None: all not final)."""
        self._num_pieces = 1
        self._tried: list[int] = []
        """How many examples there were in each attempt that failed."""
        try:
            self._layout = run.layout_of(micro.whole.inputs)
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
        self._tried.append(piece.num)
        self._story.tried = (
            self._story.tried or f"{self._what(piece)} did not fit in the {phase} pass"
        )
        if not why_not and self._run.has_exchanged_parameters():
            why_not = "the model has other parameters than when training began, and their gradients were not watched"
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
        """Into how many pieces the micro-batch is divided beforehand, here and on every rank that keeps step."""
        whole = self._micro.whole
        cuts = sizes(
            whole.num, whole.num_cells, self._run.memo.limit, self._attached.min_micro_batch
        )
        self._num_pieces = self._run.ranks.highest(len(cuts) if self._layout else 1)
        return self._num_pieces

    def measure(self) -> None:
        """Measure by which weights pieces add up.

        Ranks that keep step do it together, before the first division.

        Raises:
            IndivisibleError: there are none, or nothing to measure with.
        """
        num = self._micro.whole.num if self._layout else 0
        if -self._run.ranks.highest(-num) < 2 or self._layout is None:
            raise IndivisibleError(
                self._why_whole or "it takes two examples on each rank to measure that they add up"
            )
        self._weight(self._layout, self._num_fit())

    def finish(self) -> torch.Tensor:
        """Forward and backward of every piece.

        Returns the loss of the micro-batch, without a graph.
        """
        total: torch.Tensor | None = None
        queue = deque(self._in_step() if self._run.ranks.in_step else [self._micro.whole])
        while queue:
            piece = queue.popleft()
            parts = self._cut(piece)
            if parts[0] is not piece:
                queue.extendleft(reversed(parts))
                continue
            start = self._run.start()
            try:
                loss = self._run.ranks.attempt(partial(self._compute, piece, not queue))
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
            if queue:
                # those of the last one are those of the whole
                self._micro.start.snapshot.restore_metrics()
        self._run.ranks.finished()
        self._tell()
        assert total is not None
        return total

    def _tell(self) -> None:
        """Count it, and say it: each time that something failed, and the first time that something is divided."""
        run, story = self._run, self._story
        run.memo.num_divided += len(story.pieces) > 1
        if self._attached.family.is_vouched and self._layout is not None and len(story.pieces) > 1:
            with suppress(
                IndivisibleError
            ):  # a later look at the same micro-batch may have found otherwise
                story.loss = run.certificate.weight(self._layout, self._kind).name
        told = self._what(self._micro.whole), self._count(max(story.pieces)), self._limit()
        if story.failures:
            run.memo.num_survived += 1
            run.say(story.survived(*told))
        elif len(story.pieces) > 1 and not run.is_division_said:
            run.say(story.divided(*told))
        run.is_division_said |= len(story.pieces) > 1

    def _take_back(self, error: Exception) -> None:
        """A part cannot be computed, as with images that are not spread evenly over rows: as if none had been tried.

        What parts have added to gradients is computed once more, from the same random numbers, and
        subtracted.

        Raises:
            RuntimeError: other ranks wait for another part, or what was added does not fit once
                more.
        """
        self._why_whole = f"a part of it cannot be computed: {type(error).__name__}: {error}"
        if self._run.ranks.in_step:
            said = self._run.ranks.failed(self._phase, False, set())
            raise RuntimeError(f"survive_oom could not help: {self._why_whole}; {said}") from error
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
        """Say why, and let the error of the first attempt go on."""
        num_rows, least = (
            self._attached.trainer.args.per_device_train_batch_size,
            min(self._tried, default=1),
        )
        remedy = what_else(
            is_divisible=num_rows > 1 and (self._layout is None or least > 1),
            is_checkpointing=is_checkpointing(self._run.model),
        )
        self._run.say(self._story.refused(self._what(self._micro.whole), why, remedy))
        raise self._story.failures[0].as_error(why)

    def _compute(self, piece: Piece, is_last: bool) -> torch.Tensor:
        """Forward and backward of a piece, as the Trainer would do them."""
        self._phase = "forward"
        run = self._run
        # Frozen first: what stands in for the parameters (`ddp.py`) is to be frozen alike.
        with (
            frozen(piece.final),
            run.ranks.piece(is_last) as model,
            run.gathers.piece(piece.share, is_last),
        ):
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
        # What was not measured together, at the first micro-batch, one rank must not measure: it is
        # computed as it is.
        if self._layout is not None and self._run.certificate.knows(self._layout):
            with suppress(IndivisibleError):
                weight = self._run.certificate.weight(self._layout, self._kind)
                share = self._attached.family.share
                pieces = whole.parts(self._layout, [cut for cut in cuts if cut], weight, share)
        least = min(pieces, key=lambda piece: piece.num_cells)
        return [
            *(Piece(least.inputs, least.num, 0.0, 0.0) for _ in range(num - len(pieces))),
            *pieces,
        ]

    def _cut(self, piece: Piece) -> list[Piece]:
        if self._run.ranks.in_step:
            return [piece]
        try:
            return self._divide(piece, self._run.ranks.agreed(self._run.memo.limit))
        except IndivisibleError:
            return [
                piece
            ]  # the limit is that of another micro-batch: what cannot be divided is tried as it is

    def _divide(self, piece: Piece, limit: float) -> list[Piece]:
        cuts = sizes(piece.num, piece.num_cells, limit, self._attached.min_micro_batch)
        if len(cuts) == 1 or self._layout is None:
            return [piece]
        return piece.parts(
            self._layout, cuts, self._weight(self._layout, max(cuts)), self._attached.family.share
        )

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
        self._give_up(why or self._nothing_left(piece))

    def _nothing_left(self, piece: Piece) -> str:
        """With what is on by then: ours, and the user's."""
        on = [
            *(["checkpointing"] if is_checkpointing(self._run.model) else []),
            *self._run.memo.rungs,
        ]
        tried = f" ({' and '.join(dict.fromkeys(on))} on)" if on else ""
        return f"there is nothing smaller to try than {self._what(piece)}, and nothing left to switch on{tried}"

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

    def _weight(self, layout: Layout, num_fit: int) -> Weight:
        """By which pieces add up; measured where that is not known, or has to be looked at again."""
        certificate = self._run.certificate
        try:
            if certificate.wants(self._kind):
                self._measure(layout, num_fit)
        except IndivisibleError as error:  # what moves is why it does not add up
            raise IndivisibleError(self._run.what_moved or str(error)) from error
        if self._run.what_moved:
            raise IndivisibleError(self._run.what_moved)
        return certificate.weight(layout, self._kind)

    def _measure(self, layout: Layout, num_fit: int) -> None:
        certificate, loss = self._run.certificate, partial(self._loss, model=self._run.model)
        with self._measuring(shows_metrics=not certificate.knows(layout)) as put_back:
            try:
                certificate.measure(layout, self._micro.whole.inputs, num_fit, loss, put_back)
            except IndivisibleError as error:
                if certificate.why_broken and certificate.unchecked_since is not None:
                    self._run.say(
                        in_doubt(
                            certificate.unchecked_since, self._run.state.global_step, str(error)
                        )
                    )
                raise
        self._story.measured = certificate.known

    @cached_property
    def _kind(self) -> Kind:
        assert self._layout is not None
        return kind_of(self._layout, self._micro.whole.inputs)

    def _num_fit(self, limit: float = math.inf) -> int:
        """How many examples of this micro-batch are computed at once, at most, with this limit or the run's."""
        whole, limit = self._micro.whole, min(limit, self._run.memo.limit)
        return max(sizes(whole.num, whole.num_cells, limit, self._attached.min_micro_batch))

    def _count_computed(self, piece: Piece) -> None:
        if piece is not self._micro.whole:
            self._run.certificate.computed(piece.num_cells, self._run.state.global_step + 1)

    @contextmanager
    def _measuring(self, *, shows_metrics: bool = False) -> Iterator[Callable[[], None]]:
        """What a measurement draws and counts is put back, and it reaches no other rank.

        Gives what puts it back.
        """
        before, gathers = self._run.start().snapshot, self._run.gathers
        try:
            with gathers.measuring() if shows_metrics else gathers.apart():
                yield before.restore
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
            finding = leftover(
                self._run.card, expected_bytes, self._run.model, self._attached.trainer.optimizer
            )
            if finding is not None:
                self._run.leftover_is_said = True
                self._run.say(finding)

    def _count(self, num: int) -> str:
        unit = self._layout.unit if self._layout else "examples"
        return f"{num} {unit}" if num != 1 else f"1 {unit[:-1]}"

    def _what(self, piece: Piece) -> str:
        has_tokens = any(name.endswith(TOKEN_IDS) for name in piece.inputs)
        return self._count(piece.num) + (
            f" ({piece.num_cells} tokens, padding included)" if has_tokens else ""
        )

    def _limit(self) -> str:
        whole, limit = self._micro.whole, self._run.memo.limit
        if math.isinf(limit):
            return "open again"
        num_fit = num_that_fit(whole.num, whole.num_cells, limit)
        return f"{self._count(num_fit)} of this length at once"
