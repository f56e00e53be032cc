"""Measure the cost of the callbacks per step, next to `TrainingArguments.torch_empty_cache_steps`.

Each variant trains the same tiny Llama on batches of changing length, interleaved in one process,
for several rounds; figures are medians over rounds. On a simulated card, a flush costs as much as
freeing main memory.
"""

import gc
from collections.abc import Callable
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from benchmarks.card import card_here
from trainer_plugins import CudaCacheCallback, EvalGenerateCleanup, KVCacheGuard, MemoryWatchdog

STEPS = 60
ROUNDS = 5
ROUNDS_ON_CUDA = 3  # a card's minutes are expensive, and its times steadier
INTERVAL = 10


class Clock(TrainerCallback):
    """Measures the seconds of each step, from its start to the start of the next."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.marks.append(perf_counter())

    def seconds(self) -> float:
        """Return the mean seconds of a step, without warm-up."""
        return (self.marks[-1] - self.marks[10]) / (len(self.marks) - 11)


def rows() -> list[dict[str, torch.Tensor]]:
    """Make rows of 64 to 256 tokens, four in a row of the same length."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(64, 257, (STEPS,), generator=generator).tolist()
    data = [
        torch.randint(1, 255, (length,), generator=generator)
        for length in lengths
        for _ in range(4)
    ]
    return [{"input_ids": row, "labels": row} for row in data]


def train(callbacks: list[Any], folder: str, **settings: Any) -> tuple[float, int]:
    """Train, and return the seconds per step and the peak reserved bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2
    )
    config.num_attention_heads = config.num_key_value_heads = 4
    args = TrainingArguments(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **settings,
    )
    clock = Clock()
    trainer = Trainer(
        LlamaForCausalLM(config), args, train_dataset=rows(), callbacks=[*callbacks, clock]
    )
    trainer._get_train_sampler = lambda *_: None  # rows of one length stay together
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    trainer.train()
    return clock.seconds(), torch.accelerator.max_memory_reserved()


VARIANTS: dict[str, Callable[[], tuple[list[Any], dict[str, Any]]]] = {
    "bare Trainer": lambda: ([], {}),
    "all four": lambda: (
        [CudaCacheCallback(), EvalGenerateCleanup(), KVCacheGuard(), MemoryWatchdog()],
        {},
    ),
    "MemoryWatchdog": lambda: ([MemoryWatchdog()], {}),
    "KVCacheGuard": lambda: ([KVCacheGuard()], {}),
    f"CudaCacheCallback({INTERVAL})": lambda: ([CudaCacheCallback(INTERVAL)], {}),
    f"CudaCacheCallback({INTERVAL}, 0)": lambda: ([CudaCacheCallback(INTERVAL, 0)], {}),
    f"torch_empty_cache_steps={INTERVAL}": lambda: ([], {"torch_empty_cache_steps": INTERVAL}),
}


def microseconds_a_step(callbacks: list[Any], folder: str) -> float:
    """Measure the callbacks alone: the events of 2000 steps on a Trainer, without the steps.

    The difference of two noisy trainings cannot show a ten-thousandth of a step; this can.
    """
    args = TrainingArguments(
        folder, max_steps=3, report_to="none", save_strategy="no", disable_tqdm=True
    )
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    )
    trainer = Trainer(model, args, train_dataset=rows(), callbacks=callbacks)
    handler, state, control = trainer.callback_handler, trainer.state, trainer.control
    state.compute_steps(args, 3)
    state.max_steps = 10**9
    handler.model = trainer.model
    handler.on_train_begin(args, state, control)
    num_steps = 2000
    start = perf_counter()
    for _ in range(num_steps):
        handler.on_step_begin(args, state, control)
        state.global_step += 1
        handler.on_step_end(args, state, control)
    took = perf_counter() - start
    handler.on_train_end(args, state, control)
    return took / num_steps * 1e6


def measure() -> dict[str, float]:
    """Return ratios to the same round's bare Trainer, microseconds of events, peak reserved."""
    place = card_here()
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    reserved: dict[str, int] = {}
    alone: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with TemporaryDirectory() as folder:
        for _ in range(ROUNDS_ON_CUDA if place == "cuda" else ROUNDS):
            for name, make in VARIANTS.items():
                callbacks, settings = make()
                took, reserved[name] = train(callbacks, folder, **settings)
                seconds[name].append(took)
                alone[name].append(microseconds_a_step(make()[0], folder))
    bare = seconds["bare Trainer"]
    results: dict[str, float] = {f"bare step_ms[{place}]": median(bare) * 1000}
    for name, values in seconds.items():
        results[f"{name}: step ratio"] = median(
            ours / other for ours, other in zip(values, bare, strict=True)
        )
        results[f"{name}: peak reserved ratio"] = reserved[name] / reserved["bare Trainer"]
        results[f"{name}: events_us a step"] = median(alone[name]) - median(alone["bare Trainer"])
    results["all four: share of a 100 ms step"] = results["all four: events_us a step"] / 100_000
    return results


if __name__ == "__main__":
    for name, value in measure().items():
        print(f"{name}: {value:.4g}")
