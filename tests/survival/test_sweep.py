"""Wherever in a micro-batch the memory ends, the step has the gradient it would have had."""

import copy
import math

import pytest
import torch
from transformers import Trainer, TrainerCallback

from tests.events import at
from tests.models import checkpointing
from tests.survival.failing import (
    Run,
    gradients_by_rounding,
    gradients_off_by,
    small_trainer,
    weights_by_rounding,
)
from trainer_plugins import survive_oom
from trainer_plugins.survival.memo import memo_of

POINTS = 30
MODES = {
    "no checkpointing": {},
    "checkpointing": checkpointing(reentrant=False),
    "reentrant": checkpointing(reentrant=True),
}


def forgetting_each_step(trainer: Trainer) -> TrainerCallback:
    """Has survival forget what fits, so that no step is divided because of what the one before has learned."""

    def forget(_) -> None:
        memo = memo_of(trainer)
        memo.limit, memo.pace = math.inf, None

    return at("step_begin", forget)


@pytest.mark.all(unless=lambda mode: mode == "checkpointing")
@pytest.mark.parametrize("mode", MODES)
def test_an_error_at_any_allocation_changes_nothing(tmp_path, capsys, mode: str) -> None:
    (_, num) = Run(small_trainer(tmp_path, steps=1, **MODES[mode])).num_allocations
    # The second micro-batch of each step: there are gradients of the first one then. The last ones
    # in any case.
    points = [*range(1, num - 2, max(1, num // POINTS)), num - 2, num - 1, num]
    whole = Run(small_trainer(tmp_path, steps=len(points), **MODES[mode]))

    trainer = small_trainer(tmp_path, steps=len(points), **MODES[mode])
    survive_oom(trainer)
    trainer.add_callback(forgetting_each_step(trainer))
    survived = Run(trainer, {2 * step + 1: [point] for step, point in enumerate(points)})

    assert survived.allocations.num_failed == len(points)
    worst = gradients_off_by(survived, whole)
    with capsys.disabled():
        print(
            f"\n  {mode}: {len(points)} of {num} allocations failed, gradients off by {worst:.1e} at most"
        )
    assert gradients_by_rounding(survived.gradients, whole.gradients, dtype=torch.float64) <= 1
    assert (
        weights_by_rounding(survived.weights, whole.weights, len(points), dtype=torch.float64) <= 1
    )
    assert [logs.get("learning_rate") for logs in survived.logged] == [
        logs.get("learning_rate") for logs in whole.logged
    ]


def test_the_naive_retry_fails_this_test(tmp_path) -> None:
    def naive(trainer):
        whole_step = trainer.training_step

        def training_step(model, inputs, num_items_in_batch=None):
            try:
                return whole_step(model, copy.copy(inputs), num_items_in_batch)
            except torch.OutOfMemoryError:
                pass
            halves = [
                {k: v[part] for k, v in inputs.items()} for part in (slice(0, 2), slice(2, 4))
            ]
            return sum(whole_step(model, half, num_items_in_batch) for half in halves)

        trainer.training_step = training_step
        return trainer

    whole = Run(small_trainer(tmp_path, steps=1))
    num = whole.num_allocations[1]

    early, late = (
        Run(naive(small_trainer(tmp_path, steps=1)), {1: [at]}) for at in (num // 4, num - 2)
    )

    assert gradients_off_by(early, whole) <= 1e-12, "in the forward pass it is right"
    assert gradients_off_by(late, whole) > 1e-2, (
        "in the backward pass some parameters get the gradient twice"
    )
