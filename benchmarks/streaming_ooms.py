"""Inject an out-of-memory error at each allocation of a step with a streamed base, and each fetch.

`survive_oom` computes the step again; its gradients are compared with those of a step without an
error, bit for bit.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.streaming.test_surviving import Growths, one_step
from tests.survival.failing import Run, off_by_steps


def lines(folder: str) -> Iterator[str]:
    """Yield a line of the table for each place of errors."""
    for checkpoints in (False, True):
        said = "with" if checkpoints else "without"
        whole = one_step(Path(folder), checkpoints)
        gc.collect()
        gc.freeze()  # a recovery collects garbage: exclude the libraries' objects
        allocations = range(1, whole.num_allocations[0] + 1)

        def at_allocation(position: int, checkpoints: bool = checkpoints) -> Run | None:
            ran = one_step(Path(folder), checkpoints, {0: [position]})
            return ran if ran.allocations.num_failed == 1 else None

        yield f"| allocation, {said} checkpointing | {_score(whole, allocations, at_allocation)} |"

        def at_fetch(position: int, checkpoints: bool = checkpoints) -> Run | None:
            with pytest.MonkeyPatch.context() as patch:
                failing = Growths(patch, position)
                ran = one_step(Path(folder), checkpoints)
            return ran if failing.num_failed == 1 else None

        fetched = range(1, (2 * (3 - 1) + 1) * 7 + 1)  # three layers of seven weights, one resident
        yield f"| weight fetched, {said} checkpointing | {_score(whole, fetched, at_fetch)} |"


def _score(whole: Run, positions: Iterable[int], run: Callable[[int], Run | None]) -> str:
    ran = [run(position) for position in positions]
    equal = sum(
        one is not None and off_by_steps(one.gradients, whole.gradients) == 0 for one in ran
    )
    return f"{equal} of {len(ran)}"
