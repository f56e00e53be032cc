"""Recovery: finishes one micro-batch, piece by piece, and reports the result."""

import math
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from typing import NoReturn

import torch
from torch import nn

from trainer_plugins.checkpointing import is_checkpointing
from trainer_plugins.survival.attempt.attempt import DidNotFit, attempt
from trainer_plugins.survival.attempt.state import Moved, explain_not_divided, explain_rows_differ
from trainer_plugins.survival.certificate.certificate import Kind, batch_kind
from trainer_plugins.survival.certificate.comparison import report_no_room
from trainer_plugins.survival.exact.coupled import ROW, Coupling, Divided, Seam
from trainer_plugins.survival.exact.finality import explain_never_final, frozen
from trainer_plugins.survival.exact.layouts import Layout, Rows
from trainer_plugins.survival.exact.shares import IndivisibleError, Inputs, NumItems, Weight
from trainer_plugins.survival.limit.ladder import CHECKPOINTING
from trainer_plugins.survival.limit.limit import Pace, has_tokens, lower, num_that_fit, sizes
from trainer_plugins.survival.micro_batch import Added, MicroBatch, Piece, Start
from trainer_plugins.survival.training_run import TrainingRun
from trainer_plugins.survival.words import Story, part_raised, report_doubt, suggest_else


class Recovery:
    """Finishes one micro-batch on a rank that divides independently."""

    def __init__(self, run: TrainingRun, micro: MicroBatch, **options: object) -> None:
        self._run, self._attached, self._micro = run, run.attached, micro
        self._ranks = run.ranks
        self._options, self._phase = options, ""
        self._layout: Layout | None = None
        self._why_whole = ""  # why the micro-batch cannot be divided
        inputs = micro.whole.inputs
        try:
            self._layout = run.layout_of(inputs)
        except IndivisibleError as error:
            self._why_whole = str(error)
        micro.whole.num = self._layout.count(inputs) if self._layout else 1
        self._coupling = self._attached.family.coupling
        self._seam = self._coupling if isinstance(self._coupling, Seam) else None
        if self._seam is not None and isinstance(self._layout, Rows) and ROW not in inputs:
            num_rows = micro.whole.num * self._layout.per_example
            micro.whole.inputs = {**inputs, ROW: [*range(num_rows)]}
        self._story = Story(self._layout.unit if self._layout else "examples", has_tokens(inputs))
        self._num_graphs = run.num_graphs()
        self._has_looked = False  # rows were compared for this micro-batch
        self._moved: dict[str, Moved] | None = None  # changes made by the first piece
        self._added: list[Added] = []
        self._not_measured: list[tuple[int, int]] = []  # no room: examples, cells

    @classmethod
    def begin_run(cls, run: TrainingRun, inputs: Inputs, num_items: NumItems) -> None:
        """Prepare a run: the limit follows this rank's pace, up to the result of a rehearsal."""
        ceiling = run.memo.limit if run.memo.is_rehearsed else math.inf
        reading = run.card.read()
        num_retries = reading.num_alloc_retries if reading else 0
        run.memo.pace = Pace(too_much=ceiling, ceiling=ceiling, num_retries=num_retries)

    def _wrong_so_far(self) -> str:
        """Return an existing problem, such as a loss that `training_step` changed; else empty."""
        for micro in self._ranks.micros or [self._micro]:
            if micro.handed is not None and (changed := micro.handed.judge_seen()):
                return changed
        if self._run.has_exchanged_parameters():
            return (
                "the model's parameters have changed since training began, so new gradients"
                " are not tracked"
            )
        return ""

    def recover(self, piece: Piece, start: Start, failure: DidNotFit, phase: str) -> None:
        """Undo a failed attempt, keep finished gradients, and make room; raise if impossible."""
        changed = start.mark.find_changed()
        why_not = self._ranks.note_failure(phase, changed) or self._wrong_so_far()
        self._story.note_failure(failure, piece, phase)
        if why_not:
            self._give_up(why_not)
        start.snapshot.restore()
        self._run.look_for_leftover(start)
        self._make_room(piece)
        if changed:
            self._check_finality()
            if piece is not self._micro.whole:
                self._note_added(piece, start, changed)
            piece.final |= changed

    def plan(self) -> int:
        return len(self._cuts(self._micro.whole, self._run.memo.limit)) if self._layout else 1

    def finish(self) -> torch.Tensor:
        """Run forward and backward of every piece; return the loss, without a graph."""
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
                loss = self._ranks.attempt(partial(self._compute, piece, not queue, queue))
                if not isinstance(loss, DidNotFit):
                    self._look_at_state(piece, start, is_last=not queue)
            except Exception as error:
                if piece is self._micro.whole:
                    raise
                self._note_added(piece, start, start.mark.find_changed())
                self._take_back(error)
                queue, total = deque([self._micro.whole]), None
                continue
            if isinstance(loss, DidNotFit):
                self.recover(piece, start, loss, self._phase)
                queue.appendleft(piece)
                continue
            self._added.append((piece, start.snapshot, set(piece.final)))
            total = loss if total is None else total + loss
            self._note_computed(piece)
            if queue:  # the metrics of the last piece are those of the whole
                self._micro.start.snapshot.begin_next()
        if self._seam is not None:
            self._seam.forget()
        self._ranks.finish()
        self._tell()
        assert total is not None
        return total

    def _note_added(self, piece: Piece, start: Start, changed: set[nn.Parameter]) -> None:
        if changed:
            final = set(self._run.parameters) - changed
            self._added.append((piece, start.snapshot, final))

    def _note_computed(self, piece: Piece) -> None:
        self._story.pieces.append(piece.num)
        is_part = piece is not self._micro.whole
        if self._run.memo.pace is not None:
            self._run.memo.pace.note_computed(piece.num_cells, is_part)
        if is_part:
            self._run.certificate.note_computed(piece.num_cells, self._step)

    @property
    def _step(self) -> int:
        return self._attached.trainer.state.global_step + 1

    def _tell(self) -> None:
        run, story, whole = self._run, self._story, self._micro.whole
        story.num_graphs = run.num_graphs() - self._num_graphs
        is_divided = len(story.pieces) > 1
        run.memo.num_divided += is_divided
        if self._attached.family.is_vouched and self._layout is not None and is_divided:
            # A later comparison on the same micro-batch may have failed.
            with suppress(IndivisibleError):
                story.loss = run.certificate.weight(self._layout, self._kind).name
        limit = "open again"
        if not math.isinf(run.memo.limit):
            num_fit = num_that_fit(whole.num, whole.num_cells, run.memo.limit)
            limit = f"{story.count(num_fit)} of this length at once"
        if story.failures:
            run.memo.num_survived += 1
            self._attached.say(story.report_survived(whole, limit))
        elif is_divided and not run.is_division_said:
            self._attached.say(story.report_divided(whole, limit))
        run.is_division_said |= is_divided

    def _take_back(self, error: Exception) -> None:
        """Undo every part after one raised its own error: images may not be spread evenly."""
        # We compute the parts again, with the same random numbers, and subtract their gradients.
        self._why_whole = part_raised(error)
        for piece, before, final in self._added:
            before.restore()
            opposite = replace(piece, factor=-piece.factor, final=final)
            undone = self._ranks.attempt(partial(self._compute, opposite, False))
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
        num_rows = self._attached.trainer.args.per_device_train_batch_size
        least = min(self._story.nums_tried, default=1)
        remedy = suggest_else(
            is_divisible=num_rows > 1 and (self._layout is None or least > 1),
            is_checkpointing=is_checkpointing(self._run.model),
        )
        self._attached.say(self._story.report_refused(self._micro.whole, why, remedy))
        raise self._story.failures[0].make_error(why)

    def _compute(self, piece: Piece, is_last: bool, others: Iterable[Piece] = ()) -> torch.Tensor:
        """Run forward and backward of a piece; `others` are still to come."""
        self._phase = "forward"
        run, is_part = self._run, piece is not self._micro.whole
        parts = tuple(one.inputs for one in (piece, *others)) if is_part else ()
        divided = Divided(self._micro.whole.inputs, parts)
        sees_all = is_part and self._seam is not None
        if sees_all:
            self._prepare(divided)
        # Freeze first, so that the parameters' shadows (`ddp.py`) are frozen too.
        with (
            frozen(piece.final),
            self._ranks.piece(is_last) as model,
            run.gathers.piece(piece.share, is_last or sees_all, is_idle=piece.is_idle or sees_all),
        ):
            loss = self._loss(piece.inputs, divided, model, self._coupling)
            if is_part:
                self._attached.check_loss_of_part()
            self._phase = "backward"
            if loss.requires_grad:  # not if every gradient is final
                scaled = loss * (piece.factor * self._micro.scale)
                self._attached.backward(scaled, **{**self._ranks.options, **self._options})
        return loss.detach() * piece.factor

    def _loss(
        self, inputs: Inputs, whole: Divided | None, model: nn.Module, coupling: Coupling | None
    ) -> torch.Tensor:
        """Compute the loss in a context that the Trainer leaves before the backward pass."""
        compute = partial(self._run.compute_loss, model, num_items=self._micro.num_items)
        with self._attached.trainer.compute_loss_context_manager():
            if coupling is None or whole is None or inputs is whole.inputs:
                return compute(inputs)
            return coupling.loss(compute, inputs, whole)

    def _prepare(self, divided: Divided) -> None:
        """Pass parts without gradients, and exchange metrics, which are those of the whole."""
        assert self._seam is not None
        run = self._run
        with (
            self._ranks.first_pass() as model,
            self._attached.trainer.compute_loss_context_manager(),
            run.gathers.piece(1.0, True, is_idle=True),
        ):
            compute = partial(run.compute_loss, model, num_items=self._micro.num_items)
            self._seam.prepare(compute, divided)
        self._micro.start.snapshot.begin_next()

    def _first_pieces(self) -> list[Piece]:
        """Return the initial pieces; `_cut` divides them to meet the limit."""
        return [self._micro.whole]

    def _cut(self, piece: Piece) -> list[Piece]:
        try:
            return self._divide(piece, self._run.memo.limit)
        except IndivisibleError:  # the limit was learned on another micro-batch: try this one whole
            return [piece]

    def _divide(self, piece: Piece, limit: float) -> list[Piece]:
        cuts = self._cuts(piece, limit)
        if len(cuts) == 1 or self._layout is None:
            return [piece]
        weight = self._weight(self._layout, max(cuts))
        return piece.parts(self._layout, cuts, weight, self._attached.family.share)

    def _cuts(self, piece: Piece, limit: float) -> list[int]:
        return sizes(piece.num, piece.num_cells, limit, self._attached.min_micro_batch)

    def _make_room(self, piece: Piece | None) -> None:
        """Lower the limit; if pieces cannot be divided, climb the ladder, or give up.

        `piece` is None if another rank failed.
        """
        memo, why = self._run.memo, self._why_whole
        limit: float | None = memo.limit
        if piece is not None:
            limit = lower(piece.num, piece.num_cells, memo.limit, self._attached.min_micro_batch)
            if memo.pace is not None and limit is not None:
                limit = memo.pace.note_failure(piece.num_cells, limit)
            why = why or (self._nothing_left(piece) if limit is None else "")
        if not self._ranks.on_any(limit is None or self._layout is None) and limit is not None:
            try:
                self._try_limit(piece, limit)
            except IndivisibleError as error:  # on every rank
                why = str(error)
            else:
                memo.limit = self._ranks.agree(self._lower_by_measured(limit))
                return
        why = why or "another rank has nothing smaller to try, and nothing left to switch on"
        rung = memo.climb(self._attached.ladder, self._run.model)
        if not rung:
            self._give_up(why)
        self._story.switched_on.append(rung)

    def _try_limit(self, piece: Piece | None, limit: float) -> None:
        """Raise IndivisibleError if micro-batches cannot be divided to meet a limit."""
        if piece is not None:
            self._divide(piece, limit)

    def _lower_by_measured(self, limit: float) -> float:
        """Lower a limit below sizes that a measurement could not compute: training needs more."""
        pace = self._run.memo.pace
        for num, num_cells in self._not_measured:
            limit = lower(num, num_cells, limit, self._attached.min_micro_batch) or limit
            if pace is not None:
                pace.too_much = min(pace.too_much, num_cells)
        return limit

    def _nothing_left(self, piece: Piece) -> str:
        users = [CHECKPOINTING] if is_checkpointing(self._run.model) else []
        on = dict.fromkeys([*users, *self._run.memo.rungs])
        tried = f" ({' and '.join(on)} on)" if on else ""
        return (
            f"there is nothing smaller to try than {self._story.describe(piece)}, and nothing left "
            f"to switch on{tried}"
        )

    def _weight(self, layout: Layout, num_fit: int) -> Weight:
        """Return the weight that makes pieces add up; measure it if it is unknown or due again."""
        certificate = self._run.certificate
        try:
            inputs = self._micro.whole.inputs
            is_due = certificate.wants(self._kind, inputs)
            if is_due or (not self._has_looked and certificate.looks_at(inputs)):
                self._measure(layout, num_fit, is_due=is_due)
        except IndivisibleError as error:  # a buffer that changed is the reason
            raise IndivisibleError(self._run.what_moved or str(error)) from error
        return self._look_up_weight(layout)

    def _look_up_weight(self, layout: Layout) -> Weight:
        if self._run.what_moved:
            raise IndivisibleError(self._run.what_moved)
        return self._run.certificate.weight(layout, self._kind)

    def _measure(self, layout: Layout, num_fit: int, *, is_due: bool = True) -> None:
        self._has_looked = True
        certificate, inputs = self._run.certificate, self._micro.whole.inputs
        # A copy keeps the state of the coupling.
        loss = partial(self._loss, model=self._run.model, coupling=copy(self._coupling))
        if is_due:
            with self._run.measuring() as put_back:
                options = (num_fit, loss, put_back, self._micro.scale)
                self._judge(partial(certificate.measure, layout, inputs, *options))
            self._story.measured = certificate.known
            self._not_measured = certificate.did_not_fit
        with self._run.measuring() as put_back:
            look = partial(certificate.look_at_neighbours, layout, inputs, loss, put_back)
            self._judge(partial(look, is_thorough=is_due))

    def _judge(self, measure: Callable[[], None]) -> None:
        certificate = self._run.certificate
        try:
            # When ranks measure together, no rank may fail alone.
            if self._ranks.forward_is_shared:
                measure()
            elif (failure := attempt(measure)) is not None:
                raise IndivisibleError(report_no_room(failure.first_line))
        except IndivisibleError as error:
            if certificate.why_broken and certificate.divided_since is not None:
                doubt = report_doubt(certificate.divided_since, self._step - 1, str(error))
                self._attached.say(doubt)
            raise

    @cached_property
    def _kind(self) -> Kind:
        assert self._layout is not None
        return batch_kind(self._layout, self._micro.whole.inputs)

    def _look_at_state(self, piece: Piece, start: Start, *, is_last: bool) -> None:
        moved = start.snapshot.state.find_moved()
        if piece is self._micro.whole or not (moved or self._moved):
            return
        certificate = self._run.certificate
        self._moved = moved if self._moved is None else self._moved
        why = explain_not_divided(moved.values())
        skipped = certificate.overwritten | certificate.notes
        why = why or explain_rows_differ(self._moved, moved, skipped)
        if not why or certificate.why_broken:
            return
        certificate.why_broken = why
        if not is_last:
            raise IndivisibleError(why)
        self._attached.say(report_doubt(certificate.divided_since or self._step, self._step, why))

    def _check_finality(self) -> None:
        run, inputs = self._run, self._micro.whole.inputs
        if run.is_final:
            return
        probe = self._layout.probe(inputs, 1) if self._layout else inputs
        with run.measuring():
            why = explain_never_final(run.model, partial(self._loss, probe, None, run.model, None))
        if why:
            self._give_up(why)
        run.is_final = True
