"""Measure the time of `trainer-plugins check`, and of an evaluation with and without its guard.

Times are CPU times, the shortest of several rounds: wall-clock time depends on other processes. The
evaluation keeps the logits of 32 rows of 32 tokens and 32,000 words, 125 MiB, on a simulated card
of 400 MiB; on a CUDA card, which has room for them, the guard only looks.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from benchmarks.card import card_here
from trainer_plugins import EvaluationGuard
from trainer_plugins.units import MIB

ROUNDS = 3
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1000}
FLAGS = ("--gpu", "24GiB", "--seq-length", "128", "--bf16", "True")


def seconds_of_check(*flags: str) -> float:
    """Return the CPU seconds of one call of the command, with its children."""
    call = [sys.executable, "-m", "trainer_plugins", "check", *flags]
    before = os.times()
    done = subprocess.run(call, check=False, capture_output=True, text=True)
    after = os.times()
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return (
        after.children_user + after.children_system - before.children_user - before.children_system
    )


def accuracy(prediction: Any) -> dict[str, float]:
    """Take the argmax of the logits, as the guard's stand-in allows."""
    words = np.argmax(prediction.predictions, axis=-1)
    return {"accuracy": float((words == prediction.label_ids).mean())}


def evaluator(folder: str, *callbacks: EvaluationGuard) -> Trainer:
    """Make a Trainer whose evaluation keeps all logits."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32_000, num_attention_heads=4))
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(1, 32_000, (32, 32))]
    args = TrainingArguments(
        folder, report_to="none", disable_tqdm=True, dataloader_pin_memory=False
    )
    return Trainer(
        model, args, eval_dataset=rows, compute_metrics=accuracy, callbacks=list(callbacks)
    )


def seconds_and_peak(trainer: Trainer) -> tuple[float, int]:
    """Evaluate; return the CPU seconds, and the peak allocated memory of the card."""
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    begin = process_time()
    trainer.evaluate()
    return process_time() - begin, torch.accelerator.max_memory_allocated()


def main() -> None:
    """Print all figures."""
    with TemporaryDirectory() as folder:
        config = Path(folder, "config.json")
        config.write_text(json.dumps(GPT2))
        for name, flags in (("without", ()), ("with", ("--model", str(config), *FLAGS))):
            best = min(seconds_of_check(*flags) for _ in range(ROUNDS))
            print(f"check {name} --model: {best:.1f} s of CPU time")
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", card_here())
        if torch.accelerator.current_accelerator() == torch.device("simgpu"):
            from trainer_plugins.testing import simgpu

            simgpu.set_capacity(400 * MIB)
        variants = {
            "bare": evaluator(folder),
            "EvaluationGuard()": evaluator(folder, EvaluationGuard()),
            "logits_to='cpu'": evaluator(folder, EvaluationGuard(logits_to="cpu")),
            "logits_to='argmax'": evaluator(folder, EvaluationGuard(logits_to="argmax")),
        }
        for name, trainer in variants.items():
            seconds_and_peak(trainer)  # compiles, and moves the model
            figures = [seconds_and_peak(trainer) for _ in range(ROUNDS)]
            seconds, peak = min(each[0] for each in figures), figures[-1][1]
            print(f"evaluation, {name}: {seconds:.2f} s, peak {peak / MIB:.0f} MiB")


if __name__ == "__main__":
    main()
