"""Measures what `survive_oom` costs if everything fits, and if a batch is 8 times too large.

Also on two ranks (`survival_ranks.py`).
"""

import gc
from collections.abc import Callable
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from benchmarks import survival_ranks
from benchmarks.card import card_here
from trainer_plugins import survive_oom
from trainer_plugins.testing import simgpu
from trainer_plugins.units import MIB

ROUNDS = 5
STEPS = 200
CARD_MIB = 6
"""The card takes 8 rows of 64 tokens at once, but not 16."""


class ManyParameters(nn.Module):
    """A classifier that computes next to nothing, so that everything around it shows."""

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
    """Measure by how much it lengthens `training_step`, with and without it in turns."""
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

    Seconds are processor time, and the processor is the card here, so a busy machine does not
    matter.
    """

    seconds: float
    steps: int
    rows: int
    """Rows that went through the model, with those of failed attempts, rehearsals and restarts."""


def cost(num_rows: int, folder: str, *, is_restarted: bool = False) -> Cost:
    """Train 64 rows a step on a small card, in micro-batches of `num_rows`.

    If that is too many, the training survives, or is restarted.
    """
    gc.collect()
    torch.accelerator.empty_cache()
    simgpu.set_capacity(CARD_MIB * MIB)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    config.num_attention_heads = config.num_key_value_heads = 4
    rows = torch.randint(1, 127, (256, 64), generator=torch.Generator().manual_seed(0))
    args = settings(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=num_rows,
        gradient_accumulation_steps=64 // num_rows,
        auto_find_batch_size=is_restarted,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    model, num_pushed = LlamaForCausalLM(config), []
    model.register_forward_pre_hook(
        lambda *seen: num_pushed.append(len(seen[-1]["input_ids"])), with_kwargs=True
    )
    trainer = Trainer(model, args, train_dataset=data)
    if num_rows > 8 and not is_restarted:
        # No rehearsal: the room that its limit leaves, two segments of the allocator, is a third of
        # this small card.
        survive_oom(trainer, plan_first=False)
    started = process_time()
    trainer.train()
    return Cost(process_time() - started, trainer.state.global_step, sum(num_pushed))


def measure() -> dict[str, float]:
    """Return microseconds a micro-batch by number of parameters, and the large batch's ratio."""
    place = card_here()
    results: dict[str, float] = {}
    with TemporaryDirectory() as folder:
        for num in (21, 291, 739):
            results[f"{num} parameters: us a micro-batch[{place}]"] = microseconds_a_micro_batch(
                num, folder
            )
        if simgpu.is_enabled():
            pairs = [(cost(64, folder), cost(8, folder)) for _ in range(ROUNDS)]
            ratios = [ours.seconds / tuned.seconds for ours, tuned in pairs]
            results["8 times too large: time of the run over that of the tuned micro-batch"] = (
                median(ratios)
            )
            restarted = cost(64, folder, is_restarted=True)
            for name, one in (
                ("tuned", pairs[0][1]),
                ("survived", pairs[0][0]),
                ("auto_find_batch_size", restarted),
            ):
                results |= {
                    f"{name}: {field}": float(value) for field, value in one._asdict().items()
                }
    return results


if __name__ == "__main__":
    # the ranks first: they would inherit the simulated card
    for name, value in {**survival_ranks.measure(), **measure()}.items():
        print(f"{name}: {value:.4g}")
