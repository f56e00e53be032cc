"""Stories of ranks under DDP: which of them fail, in which micro-batch, and where in it. Launched by test_ddp.py.

Each rank writes what it saw, story by story: how far gradients and weights are from those of the run without a failure.
"""

import faulthandler
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from tests.models import tiny_llama
from tests.survival.failing import Run, gradients_off_by, off_by, ragged_rows, small_trainer
from tests.survival.test_sweep import AnewEachStep
from trainer_plugins import survive_oom

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FOLDER = Path(sys.argv[1])
POINTS = 20

Where = dict[int, dict[int, list[float]]]
"""By rank and micro-batch: at which parts of the allocations of the whole it fails."""

CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
USED = {"ddp_find_unused_parameters": False}


def llama(**settings):
    return small_trainer(FOLDER / "run", **{"per_device_train_batch_size": 8, "ddp_bucket_cap_mb": 1, **settings})


def tied(**settings):
    return llama(model=tiny_llama(tie_word_embeddings=True).double(), **settings)


def lora(**settings):
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    return llama(model=peft.get_peft_model(tiny_llama(), config).double(), **settings)


def in_bf16(**settings):
    return llama(model=tiny_llama(), bf16=True, **settings)


def many_layers(**settings):
    """Several buckets of the reducer, so that some are on their way when it fails."""
    return llama(model=tiny_llama(num_hidden_layers=8, hidden_size=64, intermediate_size=256).double(), **settings)


@dataclass
class Story:
    where: Where
    make: Callable = llama
    settings: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    world: int = 2


ONE = {"gradient_accumulation_steps": 1}
SHORT = {"steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 3}

STORIES = {
    "forward": Story({1: {1: [0.2]}}),
    "backward 55 %": Story({1: {1: [0.55]}}, many_layers),
    "backward 75 %": Story({1: {1: [0.75]}}, many_layers),
    "backward 97 %": Story({1: {1: [0.97]}}, many_layers),
    "rank 0": Story({0: {1: [0.75], 2: [0.2]}}),
    "unsynchronised": Story({1: {0: [0.75], 2: [0.2]}}),
    "both, elsewhere": Story({0: {1: [0.6], 2: [0.2]}, 1: {1: [0.9], 3: [0.5]}}, many_layers),
    "both, at the same place": Story({0: {1: [0.8]}, 1: {1: [0.8]}}),
    "twice in a window": Story({1: {0: [0.3], 1: [0.8]}}, settings={"gradient_accumulation_steps": 4}),
    "a piece again": Story({1: {0: [0.7], 1: [0.8]}}),
    "the last piece again, in its backward": Story({1: {0: [0.7], 1: [1.7]}}, many_layers),
    "the last piece again, in its forward": Story({1: {0: [0.7], 1: [1.15]}}, many_layers),
    "after a backward, a piece again": Story({1: {0: [0.7], 1: [1.7, 2.4]}}, many_layers),
    "one row, checkpointing switched on": Story({1: {0: [0.7], 1: [0.5]}}, settings={"per_device_train_batch_size": 2}),
    "every parameter is used": Story({1: {1: [0.75], 3: [0.2]}}, many_layers, settings=USED),
    "checkpointing": Story({1: {1: [0.75], 3: [0.2]}}, settings=CHECKPOINTING),
    "only row, checkpointing switched on": Story({1: {1: [0.8]}}, settings={"per_device_train_batch_size": 1, **USED}),
    "no accumulation": Story({1: {0: [0.75], 1: [0.2]}}, settings=ONE),
    "accumulation of 7, the last window short": Story(
        {1: {6: [0.7], 7: [0.2]}}, settings={**SHORT, "gradient_accumulation_steps": 7, "train_dataset": 160}
    ),
    "tokens averaged on each rank": Story(
        {1: {1: [0.75], 2: [0.2]}}, settings={"average_tokens_across_devices": False}
    ),
    "tied": Story({1: {1: [0.75], 2: [0.2]}}, tied),
    "LoRA": Story({1: {1: [0.75], 2: [0.2]}}, lora),
    "bf16": Story({1: {1: [0.75], 2: [0.2]}}, in_bf16),
    "three ranks, two fail": Story({0: {1: [0.75]}, 2: {0: [0.4], 1: [0.9], 3: [0.2]}}, many_layers, world=3),
}  # fmt: skip


def made(story: Story):
    settings = dict(story.settings)
    if isinstance(settings.get("train_dataset"), int):
        settings["train_dataset"] = ragged_rows(settings["train_dataset"])
    return story.make(**settings)


@cache
def whole_of(name: str) -> Run:
    return Run(made(STORIES[name]))


def same_as(name: str) -> str:
    """The first story that begins from the same run."""
    story = STORIES[name]
    return next(n for n, s in STORIES.items() if (s.make, s.settings) == (story.make, story.settings))


def facts_of(survived: Run, whole: Run) -> dict:
    memo = survived.trainer.state.stateful_callbacks.get("SurvivalMemo") or {}
    model = survived.trainer.model_wrapped
    return {
        "world": dist.get_world_size(),
        "backend": dist.get_backend(),
        "wrapper": type(model).__name__,
        "buckets": len(model.reducer._get_zeros_like_grad_buckets()),
        "find_unused": model.find_unused_parameters,
        "failed": survived.allocations.num_failed,
        "survived": sum("out_of_memory_survived" in logs for logs in survived.trainer.state.log_history),
        "allocations": survived.num_allocations == whole.num_allocations,
        "gradients": gradients_off_by(survived, whole),
        "weights": off_by(survived.weights, whole.weights),
        "digest": float(sum(weight.double().sum() for weight in survived.weights)).hex(),
        "losses": [[logs.get("loss") for logs in run.logged] for run in (survived, whole)],
        "memo": memo.get("attributes", {}),
    }


def tell(name: str) -> dict:
    faulthandler.dump_traceback_later(60, exit=True)  # a story takes a second; nothing may hang
    story, whole = STORIES[name], whole_of(same_as(name))
    trainer = made(story)
    survive_oom(trainer, **story.options)
    mine = story.where.get(RANK, {})
    fail_at = {n: [max(1, int(whole.num_allocations[n] * part)) for part in parts] for n, parts in mine.items()}
    return facts_of(Run(trainer, fail_at), whole) | {"planned": sum(map(len, mine.values()))}


SWEEPS = {
    "rank 1, unused ones looked for": ({}, {1}, 1),
    "rank 1, all used": (USED, {1}, 1),
    "rank 1, checkpointing": (CHECKPOINTING, {1}, 1),
    "rank 0, not synchronised": ({}, {0}, 0),
    "both, one from either end": (USED, {0, 1}, 1),
}


def sweep(name: str) -> dict:
    faulthandler.dump_traceback_later(60, exit=True)
    settings, ranks, which = SWEEPS[name]
    num = Run(llama(steps=1, **settings)).num_allocations[which]
    # Before them the batch is copied to the device; in a window's first micro-batch DDP then exchanges its buffers.
    first = 4 if which else 12
    points = [*range(first, num - 2, max(1, num // POINTS)), num - 2, num - 1, num]
    whole = Run(llama(steps=len(points), **settings))
    trainer = llama(steps=len(points), **settings)
    trainer.add_callback(AnewEachStep(trainer))
    mine = points if max(ranks) == RANK else points[::-1]
    fail_at = {2 * step + which: [point] for step, point in enumerate(mine)} if RANK in ranks else {}
    return facts_of(Run(trainer, fail_at), whole) | {"planned": len(fail_at), "allocations_of_one": num}


ONLY = os.environ.get("ONLY")
told = {}
for name, story in STORIES.items():
    if story.world == WORLD and (not ONLY or ONLY in name):
        print("##", RANK, name, flush=True)
        told[name] = tell(name)
if WORLD == 2:
    told |= {name: sweep(name) for name in SWEEPS if not ONLY or ONLY in name}
(FOLDER / f"rank-{RANK}.json").write_text(json.dumps(told))
dist.destroy_process_group()
