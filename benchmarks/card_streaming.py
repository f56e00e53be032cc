"""Measure on a CUDA card the cost of a streamed base: LoRA on an 8B-shaped Llama, in bf16.

Each way trains the same model, built on the card with the same random weights. First come a few
steps with deterministic kernels, whose losses and learned weights are compared bit for bit; then
the timed steps, with 1 and with 4 rows of 2048 tokens.
"""

import gc
import logging
import os
from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, Trainer, TrainerCallback
from transformers.models.auto import AutoModelForCausalLM

from benchmarks.card_survival import now
from benchmarks.streaming import checkpointing_of, settings
from trainer_plugins import StreamBase
from trainer_plugins.planner.plan import BUS_BYTES_PER_SECOND
from trainer_plugins.streaming.stream import Stream, stream_of
from trainer_plugins.units import GIB

LENGTH = 2048
NUM_ROWS = (1, 4)
CHECKED_STEPS = 3
STEPS = 6
WAYS = {"resident": 0, "2 of 32 layers": 2, "16 of 32 layers": 16}


def model_on_card() -> Any:
    """Build an 8B-shaped Llama with LoRA on all linear layers: the same weights every time."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return get_peft_model(base, LoraConfig(r=16, target_modules="all-linear"))


def rows(num: int) -> list[dict[str, torch.Tensor]]:
    """Make rows of random tokens."""
    tokens = torch.randint(0, 128256, (num, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def bus_bytes_per_second() -> tuple[float, float]:
    """Return the rates at which 1 GiB of pinned memory moves to the card, and back."""
    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    card = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    rates = []
    for to, source in ((card, host), (host, card)):
        to.copy_(source, non_blocking=True)
        started = now()
        for _ in range(5):
            to.copy_(source, non_blocking=True)
        rates.append(5 * GIB / (now() - started))
    return rates[0], rates[1]


def pinned() -> tuple[float, float]:
    """Return the seconds that this process spent pinning, and its peak of pinned bytes."""
    stats = torch.cuda.host_memory_stats()
    return stats["host_alloc_time.total"] / 1e6, stats["allocated_bytes.peak"]


class Clock(TrainerCallback):
    """Records the time and the bytes copied, at the start of each step and at the end."""

    def on_train_begin(self, *_: object, **event: Any) -> None:
        self.marks: list[float] = []
        self.copied: list[int] = []
        self.stream: Stream | None = stream_of(event["model"])

    def on_step_begin(self, *_: object, **__: object) -> None:
        if not self.marks:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.marks.append(now())
        self.copied.append(0 if self.stream is None else self.stream.fetched_bytes)

    def on_train_end(self, *event: Any, **more: Any) -> None:
        self.on_step_begin(*event, **more)


def learned(trainer: Trainer) -> list[torch.Tensor]:
    """Return copies of the trained weights."""
    model: Any = trainer.model
    return [one.detach().cpu().clone() for one in model.parameters() if one.requires_grad]


def losses(trainer: Trainer) -> list[float]:
    """Return the losses of the last training, one per step."""
    return [one["loss"] for one in trainer.state.log_history if "loss" in one]


def train(trainer: Trainer, num_rows: int, num_steps: int) -> None:
    """Train some steps with `num_rows` rows in each."""
    trainer.args.per_device_train_batch_size = trainer._train_batch_size = num_rows
    trainer.args.max_steps = num_steps
    trainer.train()


def check(trainer: Trainer) -> tuple[list[float], list[torch.Tensor]]:
    """Train with deterministic kernels; return the losses and the learned weights."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    train(trainer, 1, CHECKED_STEPS)
    torch.use_deterministic_algorithms(False)
    return losses(trainer), learned(trainer)


def again(trainer: Trainer, start: list[torch.Tensor]) -> tuple[list[float], list[torch.Tensor]]:
    """Reset the learned weights to their start, and check once again."""
    model: Any = trainer.model
    trained = [one for one in model.parameters() if one.requires_grad]
    with torch.no_grad():
        for one, before in zip(trained, start, strict=True):
            one.copy_(before)
    trainer.optimizer = trainer.lr_scheduler = None
    return check(trainer)


def timed(trainer: Trainer, clock: Clock, num_rows: int, rate: float) -> dict[str, float]:
    """Train with `num_rows` rows a step; return the median of the last four steps, and peaks."""
    train(trainer, num_rows, STEPS)
    marks, copied, stream = clock.marks, clock.copied, clock.stream
    seconds = median(after - before for before, after in pairwise(marks[2:]))
    found = {
        "s": seconds,
        "tokens/s": num_rows * LENGTH / seconds,
        "peak GiB": torch.cuda.max_memory_allocated() / GIB,
        "reserved GiB": torch.cuda.max_memory_reserved() / GIB,
    }
    if stream is None:
        return found
    copied_bytes = (copied[-1] - copied[2]) / (len(copied) - 3)
    planned_bytes = 2 * (stream.num_bytes - stream.resident_bytes)
    return found | {
        "copied GB": copied_bytes / 1e9,
        "GB/s": copied_bytes / seconds / 1e9,
        "plan, copied GB": planned_bytes / 1e9,
        "plan, at least s": planned_bytes / BUS_BYTES_PER_SECOND,
        "at this bus, s": planned_bytes / rate,
    }


def is_equal(ours: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[float, float]:
    """Return 1 or 0 for the losses, and the fraction of learned tensors that are bit-equal."""
    pairs = list(zip(ours[1], other[1], strict=True))
    return float(ours[0] == other[0]), sum(torch.equal(*pair) for pair in pairs) / len(pairs)


def figures() -> Iterator[tuple[str, float]]:
    """Yield the figures of each way."""
    # Required by deterministic kernels; torch's own default on Hopper, so nothing changes.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    logging.getLogger("transformers").setLevel(logging.ERROR)
    rate, back = bus_bytes_per_second()
    yield "bus, pinned: to the card GB/s", rate / 1e9
    yield "bus, pinned: back GB/s", back / 1e9
    resident: dict[int, float] = {}
    expected: Any = None
    with TemporaryDirectory() as folder:
        for way, num_layers in WAYS.items():
            gc.collect()
            torch.cuda.empty_cache()
            started, clock = now(), Clock()
            model = model_on_card()
            start = [one.detach().cpu().clone() for one in model.parameters() if one.requires_grad]
            yield f"{way}: model built s", now() - started
            pinned_before, started = pinned()[0], now()
            more = checkpointing_of("not reentrant")
            trainer = Trainer(
                model,
                settings(folder, bf16=True, logging_steps=1, **more),
                train_dataset=rows(STEPS * max(NUM_ROWS)),
                callbacks=[StreamBase(num_layers, on_refusal="error"), clock]
                if num_layers
                else [clock],
            )
            del model
            yield f"{way}: streaming begun s", now() - started
            yield f"{way}: of it pinning s", pinned()[0] - pinned_before
            checked = check(trainer)
            if expected is None:
                expected = checked
                equal = is_equal(again(trainer, start), expected)
            else:
                equal = is_equal(checked, expected)
            yield f"{way}: losses bit-equal", equal[0]
            yield f"{way}: weights bit-equal", equal[1]
            yield f"{way}: checked loss", checked[0][-1]
            for num in NUM_ROWS:
                found = timed(trainer, clock, num, rate)
                resident.setdefault(num, found["s"])
                found["ratio to resident"] = found["s"] / resident[num]
                named = f"{way}, {num} x {LENGTH}"
                yield from ((f"{named}: {name}", value) for name, value in found.items())
            yield f"{way}: most pinned GiB", pinned()[1] / GIB
            del trainer, clock


if __name__ == "__main__":
    for name, value in figures():
        print(f"{name}: {value:.5g}", flush=True)
