"""Measure the cost of `survive_oom` if everything fits, and if a batch is 8 times too large.

Also on two ranks (`survival_ranks.py`).
"""

import gc
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks import survival_ranks
from benchmarks.card import card_here
from benchmarks.survival_ranks import FITS, ROWS, model_and_rows
from trainer_plugins import survive_oom
from trainer_plugins.testing import simgpu
from trainer_plugins.units import MIB

ROUNDS = 5
STEPS = 20
CARD_MIB = 90
"""The card takes 8 rows of 128 tokens at once, but not 16."""


class ManyParameters(nn.Module):
    """A classifier that computes almost nothing, so that the overhead shows."""

    loss_type = "ForSequenceClassification"

    def __init__(self, num: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(num))

    def forward(self, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a loss that is a mean over rows."""
        return {"loss": ((self.weights[0] - labels.float()) ** 2).mean()}


def settings(folder: str, **more: Any) -> TrainingArguments:
    """Return quiet TrainingArguments."""
    quiet = {
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    return TrainingArguments(folder, **{**quiet, "dataloader_pin_memory": False, **more})


def microseconds_a_micro_batch(
    num_parameters: int, folder: str, clock: Callable[[], float] = process_time
) -> float:
    """Measure how much it lengthens `training_step`, with and without it in turns."""
    took: dict[bool, list[float]] = {False: [], True: []}
    data = [{"labels": 1}] * 8
    trainer = Trainer(
        ManyParameters(num_parameters), settings(folder, max_steps=2), train_dataset=data
    )
    trainer.train()
    for turn in range(2 * ROUNDS):
        survival = survive_oom(trainer, vouch_for_loss=True) if turn % 2 else None
        inputs = {"labels": torch.ones(8, dtype=torch.long)}
        trainer.callback_handler.on_step_begin(trainer.args, trainer.state, trainer.control)
        trainer.training_step(trainer.model, inputs)
        started = clock()
        for _ in range(500):
            trainer.training_step(trainer.model, inputs)
        took[bool(turn % 2)].append((clock() - started) / 500)
        if survival is not None:
            survival.detach()
    return (median(took[True]) - median(took[False])) * 1e6


class Cost(NamedTuple):
    """Holds the cost of one training.

    Seconds are processor time, and the processor is the card here, so a busy machine matters less.
    """

    seconds: float
    step_seconds: float
    """The median of the steps after the first."""

    steps: int
    rows: int
    """Rows that went through the model, including failed attempts, rehearsals and restarts."""


class Clock(TrainerCallback):
    """Records the processor time at the end of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *events: Any, **objects: Any) -> None:
        """Note the time."""
        self.times.append(process_time())


def cost(num_rows: int, folder: str, *, is_restarted: bool = False) -> Cost:
    """Train 64 rows a step on a small card, in micro-batches of `num_rows`.

    If that is too many, the training survives, or is restarted.
    """
    gc.collect()
    torch.accelerator.empty_cache()
    simgpu.set_capacity(CARD_MIB * MIB)
    args = settings(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=num_rows,
        gradient_accumulation_steps=ROWS // num_rows,
        auto_find_batch_size=is_restarted,
    )
    model, rows = model_and_rows()
    data = [{"input_ids": row, "labels": row} for row in rows]
    num_pushed: list[int] = []
    model.register_forward_pre_hook(
        lambda *seen: num_pushed.append(len(seen[-1]["input_ids"])), with_kwargs=True
    )
    clock = Clock()
    trainer = Trainer(model, args, train_dataset=data, callbacks=[clock])
    if num_rows > FITS and not is_restarted:
        # No rehearsal: the headroom of its limit, two segments of the allocator, is a large part of
        # this small card.
        survive_oom(trainer, plan_first=False)
    started = process_time()
    trainer.train()
    seconds = process_time() - started
    a_step = median(after - before for before, after in pairwise(clock.times))
    return Cost(seconds, a_step, trainer.state.global_step, sum(num_pushed))


def too_large(folder: str) -> dict[str, float]:
    """Return the cost of a batch 8 times too large, compared with a tuned one and a restart."""
    results: dict[str, float] = {}
    pairs = [(cost(ROWS, folder), cost(FITS, folder)) for _ in range(ROUNDS)]
    results["time of a step over that of the tuned"] = median(
        ours.step_seconds / tuned.step_seconds for ours, tuned in pairs
    )
    results["tuned steps that the first failure costs"] = median(
        (ours.seconds - STEPS * ours.step_seconds) / tuned.step_seconds
        - (tuned.seconds / tuned.step_seconds - STEPS)
        for ours, tuned in pairs
    )
    restarted = cost(ROWS, folder, is_restarted=True)
    (survived, tuned), *_ = pairs
    named = {"tuned": tuned, "survived": survived, "auto_find_batch_size": restarted}
    for name, one in named.items():
        results |= {f"{name}: {field}": float(value) for field, value in one._asdict().items()}
    return {f"8 times too large, one card: {name}": value for name, value in results.items()}


def measure() -> dict[str, float]:
    """Return microseconds a micro-batch by number of parameters, and the large batch's figures."""
    place = card_here()
    results: dict[str, float] = {}
    with TemporaryDirectory() as folder:
        for num in (21, 291, 739):
            results[f"{num} parameters: us a micro-batch[{place}]"] = microseconds_a_micro_batch(
                num, folder
            )
        if simgpu.is_enabled():
            results |= too_large(folder)
    return results


if __name__ == "__main__":
    # the ranks first: they would inherit the simulated card
    for name, value in {**survival_ranks.measure(), **measure()}.items():
        print(f"{name}: {value:.4g}")
