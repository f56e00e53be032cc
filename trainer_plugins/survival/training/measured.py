"""Measured: a micro-batch of training, and by which weights its pieces add up."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial

import torch
from torch import nn

from trainer_plugins.survival.attempt.state import Moved, is_same
from trainer_plugins.survival.certificate.certificate import Kind, batch_kind
from trainer_plugins.survival.exact.layouts import TOKEN_IDS, IndivisibleError, Inputs, Layout
from trainer_plugins.survival.exact.modules import why_not_divided
from trainer_plugins.survival.exact.shares import Weight
from trainer_plugins.survival.limit.limit import num_that_fit, sizes
from trainer_plugins.survival.micro_batch import MicroBatch, Piece, Start
from trainer_plugins.survival.training_run import TrainingRun
from trainer_plugins.survival.words import Story, in_doubt


class Measured:
    """Measures how pieces of one micro-batch add up, and names them in words.

    Args:
        run: the training.
        micro: the micro-batch.
    """

    def __init__(self, run: TrainingRun, micro: MicroBatch) -> None:
        self._run, self._attached, self._micro = run, run.attached, micro
        self._story = Story()
        self._layout: Layout | None = None
        self._moved: dict[str, Moved] | None = None
        """What the first piece has moved of the model's state."""
        self._why_whole = ""
        """Why the micro-batch cannot be divided."""
        try:
            self._layout = run.layout_of(micro.whole.inputs)
        except IndivisibleError as error:
            self._why_whole = str(error)
        micro.whole.num = self._layout.count(micro.whole.inputs) if self._layout else 1

    def _weight(self, layout: Layout, num_fit: int) -> Weight:
        """Return the weight by which pieces add up, measured if that is unknown or due again."""
        certificate = self._run.certificate
        try:
            if certificate.wants(self._kind, self._micro.whole.inputs):
                self._measure(layout, num_fit)
        except IndivisibleError as error:  # a buffer that moved is the reason
            raise IndivisibleError(self._run.what_moved or str(error)) from error
        if self._run.what_moved:
            raise IndivisibleError(self._run.what_moved)
        return certificate.weight(layout, self._kind)

    def _measure(self, layout: Layout, num_fit: int) -> None:
        certificate, loss = self._run.certificate, partial(self._loss, model=self._run.model)
        with self._measuring(shows_metrics=not certificate.knows(layout)) as put_back:
            try:
                certificate.measure(
                    layout, self._micro.whole.inputs, num_fit, loss, put_back, self._micro.scale
                )
            except IndivisibleError as error:
                if certificate.why_broken and certificate.divided_since is not None:
                    last = self._run.state.global_step
                    self._run.say(in_doubt(certificate.divided_since, last, str(error)))
                raise
        self._story.measured = certificate.known

    def _look_at_state(self, piece: Piece, start: Start, *, is_last: bool) -> None:
        """Check that each piece has moved the model's state as the others did.

        Raises:
            IndivisibleError: it did not, and no piece has reached other ranks yet.
        """
        moved = start.snapshot.state.moved()
        if piece is self._micro.whole or not (moved or self._moved):
            return
        why = why_not_divided(moved.values())
        certificate = self._run.certificate
        first = self._moved = moved if self._moved is None else self._moved
        for key in (moved.keys() | first.keys()) - certificate.overwritten:
            values = [some[key].value if key in some else None for some in (first, moved)]
            if not is_same(*values):
                words = (moved.get(key) or first[key]).words
                why = why or f"{words} is moved by each pass according to its rows"
        if not why or certificate.why_broken:
            return
        certificate.why_broken = why
        if not is_last:
            raise IndivisibleError(why)
        step = self._run.state.global_step + 1
        self._run.say(in_doubt(certificate.divided_since or step, step, why))

    @cached_property
    def _kind(self) -> Kind:
        assert self._layout is not None
        return batch_kind(self._layout, self._micro.whole.inputs)

    def _num_fit(self, limit: float = math.inf) -> int:
        """Return the most examples computed at once, within this limit and the run's."""
        whole, limit = self._micro.whole, min(limit, self._run.memo.limit)
        return max(sizes(whole.num, whole.num_cells, limit, self._attached.min_micro_batch))

    def _count_computed(self, piece: Piece) -> None:
        if piece is not self._micro.whole:
            self._run.certificate.computed(piece.num_cells, self._run.state.global_step + 1)

    @contextmanager
    def _measuring(self, *, shows_metrics: bool = False) -> Iterator[Callable[[], None]]:
        """Undo what a measurement draws and counts; it reaches no other rank.

        Gives a function that undoes it in between.
        """
        before, gathers = self._run.start().snapshot, self._run.gathers
        try:
            with gathers.measuring() if shows_metrics else gathers.apart():
                yield before.restore
        finally:
            before.restore()
            self._run.ranks.forget()

    def _loss(self, inputs: Inputs, model: nn.Module) -> torch.Tensor:
        """Compute the loss in the context that the Trainer puts around its own call.

        In the backward pass of a micro-batch the Trainer has left that context already.
        """
        with self._attached.trainer.compute_loss_context_manager():
            return self._run.compute_loss(model, inputs, self._micro.num_items)

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
