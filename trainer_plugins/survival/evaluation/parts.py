"""Parts: a batch that needs no gradients is tried in parts, which shrink when one does not fit."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from trainer_plugins.finding import Finding, Severity
from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.survival.attempt.attempt import DidNotFit, attempt
from trainer_plugins.survival.attempt.restore_point import RestorePoint
from trainer_plugins.survival.exact.layouts import IndivisibleError, Inputs, Layout
from trainer_plugins.survival.limit.limit import cells, lower, sizes
from trainer_plugins.survival.training_run import memo_of

R = TypeVar("R")


class Parts:
    """Divides batches of one kind of work by its limit, in cells (`limit.py`)."""

    def __init__(self) -> None:
        self.limit = math.inf

    def failed(self, num: int, num_cells: int) -> None:
        """Lower the limit after so many examples did not fit.

        Raises:
            IndivisibleError: it was one example.
        """
        limit = lower(num, num_cells, self.limit, 1)
        if limit is None:
            raise IndivisibleError("there is nothing smaller to try than one example")
        self.limit = limit

    def each(
        self,
        layout: Layout,
        inputs: Inputs,
        failures: list[DidNotFit],
        before: RestorePoint,
        work: Callable[[Inputs, int, bool], R],
    ) -> Iterator[tuple[Inputs, int, R, bool]]:
        """Compute part after part.

        Gives the inputs of each, its number of examples, what `work` returns for it, and whether it
        is the last.

        Args:
            layout: how the examples lie in `inputs`.
            inputs: the whole batch.
            failures: each failure is added to these.
            before: restored when a part fails.
            work: computes a part. It gets the part, its number of examples, and whether it is the
                last; after a failure it is called again, for smaller parts.

        Raises:
            IndivisibleError: one example alone did not fit, or a part cannot be computed.
        """
        spans = deque(self._spans(0, layout.count(inputs), cells(inputs)))
        while spans:
            start, stop = spans.popleft()
            part = layout.take(inputs, start, stop)
            try:
                result = attempt(partial(work, part, stop - start, not spans))
            except IndivisibleError:
                raise
            except Exception as error:  # such as images that are not spread evenly over rows
                why = f"a part of it cannot be computed: {type(error).__name__}: {error}"
                raise IndivisibleError(why) from error
            if isinstance(result, DidNotFit):
                before.restore()
                failures.append(result)
                self.failed(stop - start, cells(part))
                spans.extendleft(reversed(self._spans(start, stop - start, cells(part))))
            else:
                yield part, stop - start, result, not spans

    def _spans(self, start: int, num: int, num_cells: int) -> list[tuple[int, int]]:
        spans = []
        for size in sizes(num, num_cells, self.limit, 1):
            spans.append((start, start + size))
            start += size
        return spans


def say_survived(trainer: HfTrainer, what: str, failures: list[DidNotFit], num_parts: int) -> None:
    """Log that a batch was finished in parts, and write it into the timeline."""
    seconds = sum(failure.seconds for failure in failures)
    finding = Finding(
        code="out-of-memory-survived",
        severity=Severity.WARNING,
        summary=f"an evaluation batch of {what} did not fit, and was computed in {num_parts} parts",
        evidence=f"failed attempts: {len(failures)}, {seconds:.2f} s; {failures[0].first_line}",
        remedy="Nothing has to be done: loss and outputs are those of the whole. "
        "A smaller per_device_eval_batch_size avoids the failed attempts.",
        amount=float(len(failures)),
    )
    memo_of(trainer).remark(trainer.args, trainer.state.global_step, finding)
