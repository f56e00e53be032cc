"""Train under a launch of `benchmarks/card_launch.py`, one at a time, and record what ran."""

import argparse
import fcntl
import json
import signal
from collections import Counter
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import Trainer, TrainingArguments, set_seed
from transformers.models.auto import AutoModelForCausalLM

from benchmarks.card_survival import Clock
from benchmarks.configs_train import peak_host_bytes
from trainer_plugins.launch.in_force import strategy_of

LENGTH = 2048
STEPS = 6
SECONDS = 50
"""The time limit of a training."""


def home_of_states(optimizer: Any) -> dict[str, int]:
    """Count the elements of the optimizer's states by device."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    homes: Counter[str] = Counter()
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                homes[f"{value.device.type} {value.dtype}"] += value.numel()
    return dict(homes)


def train(words: argparse.Namespace) -> dict[str, Any]:
    """Train six steps of one row, and return the configuration and its cost."""
    torch.set_num_threads(words.threads)
    started = perf_counter()
    set_seed(0)
    args = TrainingArguments(  # before the model, which is then loaded in parts
        str(words.result / "run"),
        max_steps=STEPS,
        per_device_train_batch_size=1,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=True,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    model = AutoModelForCausalLM.from_pretrained(words.model, dtype=getattr(torch, words.dtype))
    tokens = torch.randint(
        0,
        model.config.vocab_size,
        (STEPS, LENGTH),
        generator=torch.Generator().manual_seed(0),
    )
    clock = Clock()
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model, args, train_dataset=data, callbacks=[clock])
    trainer.train()
    steps = [after - before for before, after in zip(clock.marks, clock.marks[1:], strict=False)]
    strategy = strategy_of(trainer.model_wrapped, trainer.optimizer, args)
    return {
        "seconds": median(steps[-3:]),
        "run_seconds": perf_counter() - started,
        "tokens": LENGTH,
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "pinned_bytes": torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0),
        "host_bytes": peak_host_bytes(),
        "strategy": str(strategy),
        "parameters": dict(strategy.homes),
        "states": home_of_states(trainer.optimizer),
        "losses": [one["loss"] for one in trainer.state.log_history if "loss" in one],
    }


def main() -> None:
    """Wait for the previous launch to end, train, and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    words = parser.parse_args()
    with (words.model.parent / "one-at-a-time").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        signal.alarm(SECONDS)  # the next launch waits for this one
        result = train(words)
        (words.result / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
