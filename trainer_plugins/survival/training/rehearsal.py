"""Rehearsal: finds before step 1 how many of the longest rows fit at once, and sets the limit."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from time import perf_counter

from torch import nn

from trainer_plugins.finding import Finding, Severity
from trainer_plugins.longest import LongestRows
from trainer_plugins.survival.attempt.holders import Roots
from trainer_plugins.survival.attempt.state import RestorePoint, State
from trainer_plugins.survival.exact.layouts import Completions, find_layout
from trainer_plugins.survival.exact.shares import Batch, IndivisibleError, Inputs, NumItems
from trainer_plugins.survival.limit.limit import cells
from trainer_plugins.survival.ranks.alone import HowToRecover
from trainer_plugins.survival.training_run import TrainingRun
from trainer_plugins.survival.words import UNCHANGED

logger = logging.getLogger(__name__)


def rehearse(run: TrainingRun, inputs: Inputs, num_items: NumItems, scale: float) -> None:
    """Set the limit of a new run, if memory is counted and rows can be read.

    `inputs` are those of the first micro-batch.
    """
    ranks = run.ranks
    if ranks.on_any(run.card.read() is None or run.memo.is_rehearsed):
        return
    sources = None
    with run.memo.harmless():
        sources = _sources(run)
    if ranks.on_any(sources is None) or sources is None:
        return
    with _leave_no_trace(run, sources):
        rehearsal = None
        # This calls the user's data set and collator, whose rows may be indivisible.
        with run.memo.harmless(), suppress(IndivisibleError):
            rehearsal = _Rehearsal(run, inputs, num_items, scale)
        if ranks.on_any(rehearsal is None) or rehearsal is None:
            return
        found = None
        # A row that no sampler draws may be unfit for training; but an error ends ranks that wait.
        with nullcontext() if ranks.forward_is_shared else run.memo.harmless():
            found = rehearsal.find()
        if found is None:
            return
    num_fit, climbed = found
    run.memo.is_rehearsed = True
    if num_fit < rehearsal.num:
        least = min(run.attached.min_micro_batch, rehearsal.num)
        run.memo.limit = rehearsal.cells(max(num_fit, least))
    elif not climbed:
        logger.info("%s: they fit at once", rehearsal.describe())
        return
    run.card.release_cached()  # failed attempts have cut it into small pieces
    run.attached.say(rehearsal.report(num_fit, climbed))


def divide_from_the_start(run: TrainingRun, inputs: Inputs) -> None:
    """Limit a run to the size of `rows_at_once` of its longest rows, in tokens with padding.

    `inputs` are those of the first micro-batch; they are used if the data cannot be read.
    """
    trainer, longest = run.attached.trainer, inputs
    with run.memo.harmless():
        if (sources := _sources(run)) is not None:
            with _leave_no_trace(run, sources):
                longest = _longest_batch(run, inputs) or inputs
    part = run.attached.rows_at_once / trainer._train_batch_size
    if part < 1:
        run.memo.limit = min(run.memo.limit, part * cells(longest))
        run.memo.is_rehearsed = True


class _Rehearsal:
    def __init__(self, run: TrainingRun, inputs: Inputs, num_items: NumItems, scale: float) -> None:
        self._run, self._num_items, self._scale = run, num_items, scale
        self._num_tried, self._started = 0, perf_counter()
        self._inputs = _longest_batch(run, inputs)
        self._layout = find_layout(run.attached.family.layouts, self._inputs)
        self.num = self._layout.count(self._inputs)

    def find(self) -> tuple[int, list[str]]:
        run, ladder, climbed = self._run, self._run.attached.ladder, list[str]()
        while not (num_fit := self._most()) and (rung := run.memo.climb(ladder, run.model)):
            climbed.append(rung)
        return num_fit, climbed

    def cells(self, num: float) -> int:
        return cells(self._some(num))

    def describe(self) -> str:
        return (
            f"rehearsed {self._what} ({self.cells(self.num)} tokens with "
            f"padding) in {self._num_tried} forward and backward passes, "
            f"{perf_counter() - self._started:.2f} s"
        )

    def report(self, num_fit: int, climbed: list[str]) -> Finding:
        """Report how many of the longest rows fit at once, before step 1."""
        if num_fit:
            summary = f"{num_fit} of {self._what} fit at once"
            summary += "".join(f", with {rung} switched on" for rung in climbed)
        else:
            least = self._run.attached.min_micro_batch
            summary = f"not even {least} of {self._what} fit at once: a step with them will fail"
        if num_fit < self.num:
            summary += (
                f"; micro-batches of more than {self._run.memo.limit:.0f} tokens (rows x"
                " padded length) will be split"
            )
        return Finding(
            code="out-of-memory-foreseen",
            severity=Severity.INFO if num_fit else Severity.WARNING,
            summary=summary,
            evidence=self.describe(),
            remedy=UNCHANGED if num_fit else "Use gradient checkpointing, or shorter sequences.",
            amount=float(num_fit),
        )

    @property
    def _what(self) -> str:
        if isinstance(self._layout, Completions):
            return f"{self.num} completions of full length"
        return f"the {self.num} longest {self._layout.unit}"

    def _most(self) -> int:
        least = self._run.attached.min_micro_batch
        # Completions may never reach their maximum length: predict one's peak before trying it.
        parts = (0.25, 0.5) if isinstance(self._layout, Completions) else ()
        return self._run.ranks.most(self._compute, self.num, least, parts)

    def _compute(self, model: nn.Module, num: float) -> None:
        """Run forward and backward of `num` examples; ranks may do so unequally often."""
        self._num_tried += 1
        attached = self._run.attached
        with self._run.gathers.apart():
            with attached.trainer.compute_loss_context_manager():
                loss = self._run.compute_loss(model, self._some(num), self._num_items)
            attached.backward(loss * self._scale, **self._run.ranks.options)

    def _some(self, num: float) -> Batch:
        """Take the last ones: they include the short one, which is padded."""
        some = self._layout.take(self._inputs, self.num - math.ceil(num), self.num)
        if num < 1 and isinstance(self._layout, Completions):
            return self._layout.shorten(some, num)
        return some


def _longest_batch(run: TrainingRun, inputs: Inputs) -> Inputs:
    """Collate the longest rows as the data loader would; empty if that would consume them."""
    trainer = run.attached.trainer
    for layout in run.attached.family.layouts:
        if isinstance(layout, Completions):
            if run.ranks.recovery is HowToRecover.PLANNED:
                return layout.longest(inputs, getattr(trainer.args, "max_completion_length", None))
            # They may never get that long, and we can survive a failure.
            logger.info("nothing is rehearsed: the length of completions is unknown")
            return {}
    loader = trainer.callback_handler.train_dataloader
    dataset, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
    rows = LongestRows(dataset, collate, trainer._train_batch_size, trainer.model)
    if not rows:
        logger.info("nothing is rehearsed: %s cannot return single rows", type(dataset).__name__)
        return {}
    batch: Inputs = trainer._prepare_inputs(rows.batch(len(rows)))
    return batch


def _sources(run: TrainingRun) -> State | None:
    """Save the state that a Trainer and its rows draw from or count with; None if consumed."""
    trainer = run.attached.trainer
    loader = trainer.callback_handler.train_dataloader
    roots = {name: getattr(loader, name, None) for name in ("dataset", "collate_fn")}
    sources = State(Roots({**roots, "trainer": trainer}))
    if one := next(sources.name_consumed(), ""):
        logger.info("nothing is rehearsed: rows come from %s, which cannot be restored", one)
        return None
    return sources


@contextmanager
def _leave_no_trace(run: TrainingRun, sources: State) -> Iterator[None]:
    """Restore everything afterwards, except gradients, which `ranks.most` restores."""
    before = RestorePoint(run.attached.trainer, state=run.certificate.full_state())
    try:
        yield
    finally:
        before.restore()
        with run.memo.harmless():
            sources.restore_draws()
            sources.restore()
        run.card.reset_peak()
