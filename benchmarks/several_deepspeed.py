"""Repeats the run of DeepSpeed#3734 as the first of eight ranks, on tensors without bytes.

Its author's script is opt_test.py of gnovack/distributed-training-and-deepspeed (bf01c8bb8386). It
loads OPT-13B in fp32 and gives it to `deepspeed.initialize`, which makes it fp16: there is no
Trainer, and no `zero.Init`. The engine is the installed DeepSpeed's own.
"""

import os
from dataclasses import replace

import torch
import transformers

from benchmarks.published import Row
from trainer_plugins.patched import Patches
from trainer_plugins.planner.pretend.as_on_card import ANY_CARD, World, in_world
from trainer_plugins.planner.request import ConfigSource, PlanRequest
from trainer_plugins.planner.sharded.ranks import Ranks
from trainer_plugins.planner.tracing.events import Trace
from trainer_plugins.planner.tracing.trace import Tracker

NUM_STEPS = 2


def trace_of(row: Row) -> Trace:
    """Return what the card of the first rank would see."""
    os.environ["DS_ACCELERATOR"] = "cuda"  # before DeepSpeed is imported
    from trainer_plugins.planner.sharded.zero_engine import run_without_bytes

    request = PlanRequest(
        source=ConfigSource(config={}, arguments=()),
        num_gpus=row.settings["num_gpus"],
        num_nodes=1,
    )
    with (
        in_world(World(device="cuda", card=replace(ANY_CARD, capability=(8, 0)))) as tracker,
        Ranks(request).around(tracker),
        Patches() as patches,
    ):
        run_without_bytes(patches, tracker)
        _train(row, tracker)
        return tracker.trace()


def _train(row: Row, tracker: Tracker) -> None:
    import deepspeed

    config = transformers.AutoConfig.for_model(**row.architecture)
    model = transformers.OPTForCausalLM._from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": row.settings["batch"],
            "optimizer": {"type": "Adam", "params": {"lr": 5e-5}},
            "fp16": {"enabled": True},
            "zero_optimization": {"stage": int(row.settings["strategy"][-1])},
        },
    )
    engine.train()
    shape = (row.settings["batch"], row.settings["seq_length"])
    for _ in range(NUM_STEPS):
        tokens, labels = (torch.ones(shape, dtype=torch.long, device="cuda") for _ in range(2))
        tracker.moment = "forward"
        outputs = engine(tokens, labels=labels)  # kept until the next ones, with the KV cache
        tracker.moment = "backward"
        engine.backward(outputs.loss)
        tracker.moment = "optimizer step"
        engine.step()
    tracker.moment = "save"  # when all of it dies
