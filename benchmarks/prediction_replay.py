"""Replays published runs on tensors without bytes, and prints a JSON line for each row.

Usage: `python -m benchmarks.prediction_replay KEY ...`.

The planner's world, kernels and allocator, by the rules of the torch that was measured; not its
Trainer, because these rows were measured in loops of their own. A loop differs from the Trainer's
in what it keeps alive, which is what `loop` of a row says. Nothing is printed for a row that ends
the process: who started it sees which one.
"""

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional

from benchmarks.published import CARDS, Row, published
from trainer_plugins.allocator.model import AllocatorRules, first_of_a_size
from trainer_plugins.planner.cards import card_of
from trainer_plugins.planner.plan import Moment
from trainer_plugins.planner.pretend import fake_cuda, quantised
from trainer_plugins.planner.pretend.as_on_card import World, in_world
from trainer_plugins.planner.rehearse import loading
from trainer_plugins.planner.tracing import kernels
from trainer_plugins.planner.tracing.events import Trace
from trainer_plugins.planner.tracing.replay import replay
from trainer_plugins.planner.tracing.trace import Tracker

ROW_SECONDS = 120
"""A row that computes for longer ends the process."""

AFTERWARDS: Moment = "save"
"""The moment, as the planner calls one, when what the run held dies."""


@contextlib.contextmanager
def memory_efficient_attention() -> Iterator[None]:
    """Restrict SDPA to the memory-efficient kernel, which needs a key for each head."""

    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, *_: Any, **given: Any
    ) -> Any:
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        is_causal, scale = given.get("is_causal", False), given.get("scale")
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, torch.is_grad_enabled(), 0.0, is_causal, scale=scale
        )[0]

    before = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before


def model_of(row: Row) -> Any:
    """Make the model as the row does, with its adapter."""
    import transformers
    from transformers import modeling_utils

    settings = row.settings
    config = transformers.AutoConfig.for_model(**row.architecture)
    attention = "eager" if settings["attention"] == "eager" else "sdpa"
    model = getattr(transformers, row.architecture["architectures"][0])._from_config(
        config, dtype=getattr(torch, settings["dtype"]), attn_implementation=attention
    )
    if settings.get("quantization") == "nf4":
        model = with_base_in_nf4(model, getattr(torch, settings["dtype"]))
    else:
        if row.loop.get("device_map"):
            names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
            device = torch.device("cuda", 0)
            modeling_utils.caching_allocator_warmup(model, dict.fromkeys(names, device), None)
        model = model.to("cuda")
    return adapted(model, row)


def adapted(model: Any, row: Row) -> Any:
    """Return the row's model with its adapter and checkpointing."""
    settings = row.settings
    if "peft_config" in settings:
        model = with_adapter(
            model, settings["peft_config"], settings.get("autocast_adapter_dtype", True)
        )
    if settings.get("checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if "peft_config" in settings:
            model.enable_input_require_grads()
    return model.train()


def with_base_in_nf4(model: Any, dtype: torch.dtype) -> Any:
    """Load and prepare the model as fitcheck's scripts/measure.py does."""
    import peft
    import transformers

    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )
    card = torch.device("cuda", 0)
    made, in_turn = loading.each_alone(model, card, dtype)
    loaded = quantised.quantise(model, config, card, dtype, False, made, in_turn)
    return peft.prepare_model_for_kbit_training(loaded)


def with_adapter(model: Any, written: Mapping[str, Any], autocast_adapter_dtype: bool) -> Any:
    """Return the PEFT model."""
    import peft

    values = {key: value for key, value in written.items() if key != "type"}
    config = peft.PEFT_TYPE_TO_CONFIG_MAPPING[written["type"]](task_type="CAUSAL_LM", **values)
    return peft.get_peft_model(model, config, autocast_adapter_dtype=autocast_adapter_dtype)


def train(
    row: Row, tracker: Tracker, seq_length: int, load: Callable[[Row], Any] = model_of
) -> None:
    """Run two steps of the row's own loop; the second is the first with optimizer states."""
    settings, loop = row.settings, row.loop
    model = load(row)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-5)
    shape = (settings["batch"], seq_length)
    autocast = torch.autocast("cuda", dtype=getattr(torch, settings.get("autocast", "float32")))
    tracker.moment = "forward"
    for step in range(2):
        if step and "empty_cache_every" in loop:
            torch.cuda.empty_cache()
        if loop["gradients"] != "kept":
            optimizer.zero_grad()
        batch = {"input_ids": torch.ones(shape, dtype=torch.long, device="cuda")}
        batch["labels"] = (
            batch["input_ids"].clone() if settings.get("padded") else batch["input_ids"]
        )
        if settings.get("padded"):
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            batch["attention_mask"][0, -1] = 0  # a mask of ones alone is left out
        with autocast if "autocast" in settings else contextlib.nullcontext():
            output = model(**batch, use_cache=loop.get("use_cache", False))
        output.loss.backward()
        if loop["outputs_until"] == "backward":
            del output
        if loop["max_grad_norm"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), loop["max_grad_norm"])
        optimizer.step()
        if loop["outputs_until"] == "step":
            del output
        if loop["gradients"] == "kept":
            optimizer.zero_grad(set_to_none=False)
    tracker.moment = AFTERWARDS


@contextlib.contextmanager
def torch_of(row: Row) -> Iterator[AllocatorRules]:
    """Let kernels take what those of the row's torch take; yield the rules of its allocator."""
    version = row.versions["torch"]
    number = [int(part) for part in version.split(".")[:2]]
    with (
        patch.object(kernels, "_LT_HAS_ITS_OWN", number < [2, 12]),
        patch.object(kernels, "_MULTIPLIES_OUTER", number == [2, 13]),
    ):
        yield AllocatorRules(first_of_a_size=first_of_a_size(version))


def trace_of(row: Row, gpu: str, seq_length: int) -> Trace:
    """Return what the card would see."""
    world = World(
        device="cuda", card=card_of(CARDS[gpu]), has_padding=row.settings.get("padded", False)
    )
    with in_world(world) as tracker:
        with (
            memory_efficient_attention()
            if row.settings["attention"] == "efficient"
            else contextlib.nullcontext()
        ):
            train(row, tracker, seq_length)
        return tracker.trace()


def main(keys: list[str]) -> None:
    """Replay the rows of these keys; one may end in `@LENGTH` for a sequence length of its own."""
    fake_cuda.install()
    rows = {row.key: row for row in published()}
    for asked in keys:
        key, _, length = asked.partition("@")
        row = rows[key]
        signal.setitimer(signal.ITIMER_VIRTUAL, ROW_SECONDS)
        with torch_of(row) as rules:
            trace = trace_of(row, row.gpu, int(length or row.settings["seq_length"]))
        found = replay(trace, None, rules)
        during = [
            event for event in trace.events if event.moment != AFTERWARDS and event.number >= 0
        ]
        step_end = sum(event.kind * found.block_bytes[event.number] for event in during)
        answer = {
            "allocated": found.allocated_peak_bytes,
            "reserved": found.reserved_peak_bytes,
            "step_end": step_end,
        }
        print(json.dumps({"key": asked, **answer}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
