"""Measure on a CUDA card how a surviving run compares with one tuned by hand.

A causal LM of 0.5 billion parameters in bf16 trains on rows of 1024 tokens, 64 in a step. PyTorch's
share of the card is limited so that 8 rows fit at once, and 16 do not. Runs alternate in one
process.
"""

import gc
from collections.abc import Iterator
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from transformers import LlamaConfig, Trainer, TrainerCallback
from transformers.models.auto import AutoModelForCausalLM

from benchmarks.survival import microseconds_a_micro_batch, settings
from trainer_plugins import survive_oom
from trainer_plugins.survival.memo import SurvivalMemo
from trainer_plugins.units import GIB

LENGTH = 1024
ROWS = 64
TUNED = 8
WAYS = ("tuned", "survived", "survived, plan_first=False", "auto_find_batch_size")
TURNS = (*WAYS, "survived", "tuned")
SECONDS_A_RUN = 6
"""The approximate time of a run, which sets its number of steps, 6 to 12."""


def now() -> float:
    """Return the time once the card has finished all its work."""
    torch.cuda.synchronize()
    return perf_counter()


def model_on_card(**changed: Any) -> Any:
    """Build the model on the card: the same random weights every time."""
    sizes = {"hidden_size": 1280, "intermediate_size": 3456, "num_hidden_layers": 24}
    heads = {"num_attention_heads": 20, "num_key_value_heads": 20}
    config = LlamaConfig(
        vocab_size=32000, tie_word_embeddings=True, use_cache=False, **{**sizes, **heads, **changed}
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def rows(num: int) -> list[dict[str, torch.Tensor]]:
    """Make rows whose next token follows from the last, so that there is something to learn."""
    first = torch.randint(0, 32000, (num, 1), generator=torch.Generator().manual_seed(0))
    tokens = (first + 7 * torch.arange(LENGTH)) % 32000
    return [{"input_ids": row, "labels": row} for row in tokens]


class Clock(TrainerCallback):
    """Records the time at the start of each step, and at the end of the training."""

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.marks: list[float] = []  # reset by a restarted training

    def on_step_begin(self, *_: object, **__: object) -> None:
        self.marks.append(now())

    def on_train_end(self, *_: object, **__: object) -> None:
        self.marks.append(now())


def trainer_of(num_rows: int, num_steps: int, folder: str, **more: Any) -> tuple[Trainer, Clock]:
    """Make a Trainer with `num_rows` at once, 64 in a step."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    clock = Clock()
    usual = {
        "max_steps": num_steps,
        "per_device_train_batch_size": num_rows,
        "gradient_accumulation_steps": ROWS // num_rows,
        "bf16": True,
        "learning_rate": 3e-4,
        "lr_scheduler_type": "constant",
        "logging_strategy": "steps",
        "logging_steps": 1,
    }
    args = settings(folder, **{**usual, **more})
    data = rows(num_steps * ROWS)
    return Trainer(model_on_card(), args, train_dataset=data, callbacks=[clock]), clock


def limit_card(folder: str) -> float:
    """Leave room for 8 rows at once and half as many again; return the seconds of a tuned step."""
    trainer, clock = trainer_of(TUNED, 2, folder)
    trainer.train()
    weight_bytes = sum(one.nbytes for one in trainer.model.parameters())
    kept_bytes = 4 * weight_bytes  # with gradients, and AdamW's two states in bf16
    peak_bytes = torch.cuda.max_memory_reserved()
    allowed_bytes = kept_bytes + 1.5 * (peak_bytes - kept_bytes)
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed_bytes / total_bytes))
    print(f"{allowed_bytes / GIB:.1f} GiB are allowed, a tuned run reserves {peak_bytes / GIB:.1f}")
    return clock.marks[2] - clock.marks[1]


def run(way: str, num_steps: int, folder: str) -> dict[str, float]:
    """Train in one way, and return its cost."""
    is_found = way == "auto_find_batch_size"
    num_at_once = TUNED if way == "tuned" else ROWS
    trainer, clock = trainer_of(num_at_once, num_steps, folder, auto_find_batch_size=is_found)
    computed: list[int] = []
    trainer.model.register_forward_pre_hook(
        lambda *seen: computed.append(len(seen[-1]["input_ids"])), with_kwargs=True
    )
    if way.startswith("survived"):
        survive_oom(trainer, plan_first=way == "survived")
    started = now()
    trainer.train()
    seconds = now() - started
    steps = trainer.state.global_step
    rows_a_step = trainer._train_batch_size * trainer.args.gradient_accumulation_steps
    tokens = rows_a_step * LENGTH
    memo: Any = next(
        (one for one in trainer.callback_handler.callbacks if isinstance(one, SurvivalMemo)), None
    )
    found = {
        "s": seconds,
        "steps": steps,
        "rows computed": sum(computed),
        "largest at once": max(computed[-ROWS // TUNED :]),
        "tokens/s": steps * tokens / seconds,
        "after step 1": (steps - 1) * tokens / (clock.marks[-1] - clock.marks[1]),
        "peak GiB": torch.cuda.max_memory_reserved() / GIB,
        "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
        "OOMs": torch.cuda.memory_stats().get("num_ooms", 0),
        "last loss": [one["loss"] for one in trainer.state.log_history if "loss" in one][-1],
    }
    return found | ({"limit": memo.limit / LENGTH} if memo is not None else {})


def cost_of_model(folder: str) -> float:
    """Return the us that survival adds to a micro-batch of the model: 1 row of 32 tokens."""
    trainer, _ = trainer_of(1, 1, folder, gradient_accumulation_steps=1)
    trainer.train()
    inputs = {key: value[None, :32].cuda() for key, value in rows(1)[0].items()}
    took: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(10):
        survival = survive_oom(trainer) if turn % 2 else None
        trainer.callback_handler.on_step_begin(trainer.args, trainer.state, trainer.control)
        trainer.training_step(trainer.model, dict(inputs))
        started = now()
        for _ in range(10):
            trainer.training_step(trainer.model, dict(inputs))
        took[bool(turn % 2)].append((now() - started) / 10)
        if survival is not None:
            survival.detach()
    print(f"a micro-batch of 1 row of 32 tokens takes {median(took[False]) * 1e3:.2f} ms without")
    return (median(took[True]) - median(took[False])) * 1e6


def figures() -> Iterator[tuple[str, float]]:
    """Yield the figures of each run, the ratios to the tuned one, and the cost if all fits."""
    begun = perf_counter()
    with TemporaryDirectory() as folder:
        num_steps = max(6, min(12, int(SECONDS_A_RUN / max(limit_card(folder), 1e-3))))
        found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for turn, way in enumerate(TURNS):
            if turn >= len(WAYS) and perf_counter() - begun > 60:
                break
            one = run(way, num_steps, folder)
            yield from ((f"{way}, turn {turn}: {name}", value) for name, value in one.items())
            found[way].append(one)
        for way in WAYS[1:]:
            for name in ("tokens/s", "after step 1"):
                ours, tuned = (median(one[name] for one in found[each]) for each in (way, "tuned"))
                yield f"{way} over tuned: {name}", ours / tuned
        torch.cuda.set_per_process_memory_fraction(1.0)
        yield "cost: us a micro-batch of the model", cost_of_model(folder)
        for num in (21, 739):
            cost = microseconds_a_micro_batch(num, folder, clock=now)
            yield f"cost: us a micro-batch, {num} parameters", cost


if __name__ == "__main__":
    for name, value in figures():
        print(f"{name}: {value:.5g}", flush=True)
