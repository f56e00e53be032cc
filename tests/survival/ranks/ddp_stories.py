"""Stories of ranks under DDP: which of them fail, in which micro-batch, and where in it.

Launched by test_ddp.py.

Each rank writes what it saw, story by story: how far gradients and weights are from those of the
run without a failure.
"""

import faulthandler
import gc
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers import Trainer

from tests import processes
from tests.events import at
from tests.models import IS_OLD, checkpointing, tiny_llama
from tests.survival.failing import (
    Run,
    gradients_by_rounding,
    gradients_off_by,
    numbers_off_by,
    off_by,
    off_by_steps,
    padded,
    ragged_rows,
    small_trainer,
    weights_by_rounding,
)
from tests.survival.ranks.half_full import HalfFull
from tests.survival.test_sweep import forgetting_each_step
from tests.wanted import read_wanted
from trainer_plugins import survive_oom
from trainer_plugins.survival.memo import memo_of

# transformers 4's BERT cannot be called twice before a backward pass where DDP broadcasts its buffers.
BUFFERS = {"ddp_broadcast_buffers": False} if IS_OLD else {}
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
FOLDER = Path(sys.argv[-1])
POINTS = 10

Where = dict[int, dict[int, list[float]]]
"""By rank and micro-batch: at which parts of the allocations of the whole it fails."""

CHECKPOINTING = checkpointing(reentrant=False)
USED = {"ddp_find_unused_parameters": False}


def llama(**settings) -> Trainer:
    return small_trainer(
        FOLDER / "run", **{"per_device_train_batch_size": 8, "ddp_bucket_cap_mb": 1, **settings}
    )


def tied(**settings) -> Trainer:
    return llama(model=tiny_llama(tie_word_embeddings=True).double(), **settings)


def lora(**settings) -> Trainer:
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    return llama(model=peft.get_peft_model(tiny_llama(), config).double(), **settings)


def in_bf16(**settings) -> Trainer:
    return llama(model=tiny_llama(), bf16=True, **settings)


def many_layers(**settings) -> Trainer:
    """Several buckets of the reducer, so that some are on their way when it fails."""
    return llama(
        model=tiny_llama(num_hidden_layers=8, hidden_size=64, intermediate_size=256).double(),
        **settings,
    )


class Expert(torch.nn.Module):
    """For rows that begin with token 1."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.expert = inner, torch.nn.Linear(32, 32, dtype=torch.float64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out, rows = self.inner(ids), ids[:, 0] == 1
        return torch.where(rows[:, None, None], out + self.expert(out), out) if rows.any() else out


def one_for_the_expert(rows: list[dict]) -> dict:
    """The first row of each micro-batch, which is never in its last piece."""
    batch = padded(rows)
    batch["input_ids"][:, 0] = torch.tensor([1] + [2] * (len(rows) - 1))
    return batch


def with_expert(**settings) -> Trainer:
    model = tiny_llama().double()
    model.model.embed_tokens = Expert(model.model.embed_tokens)
    return llama(model=model, data_collator=one_for_the_expert, **settings)


def with_towers(**settings) -> Trainer:
    """Pictures and texts; the weights behind the towers get their gradient in the first piece."""
    from tests.survival import test_contrastive

    model = test_contrastive.clip()
    for name, weight in model.named_parameters():
        weight.requires_grad_("k_proj.bias" not in name)  # its gradient is nothing but rounding
    return test_contrastive.contrastive(FOLDER / f"towers-{RANK}", model, **settings)


def ranking(gathers: bool = False, **settings) -> Trainer:
    """sentence-transformers' way: a loss that keeps the wrapped model and calls it for each column."""
    from tests.survival import test_sentences

    loss = test_sentences.GatheringRanking if gathers else test_sentences.Ranking
    settings = {"per_device_train_batch_size": 8, **BUFFERS, **settings}
    trainer = test_sentences.ranking(FOLDER / f"ranking-{RANK}", loss, **settings)
    for name, weight in trainer.model.named_parameters():
        weight.requires_grad_("key.bias" not in name)  # its gradient is nothing but rounding
    return trainer


def by_the_library(name: str, **settings) -> Trainer:
    from tests.survival import test_sentences

    settings = {"per_device_train_batch_size": 8, **BUFFERS, **settings}
    trainer = test_sentences.by_the_library(FOLDER / f"sentences-{RANK}", name, **settings)
    for name, weight in trainer.model.named_parameters():
        weight.requires_grad_("key.bias" not in name and "pooler" not in name)
    return trainer


def fewer_on_rank_1(rows: list[dict]) -> dict:
    from tests.survival import test_sentences

    return test_sentences.two_columns(rows[: len(rows) - RANK])


def trl_trainer(name: str, **settings) -> Trainer:
    from tests.survival import test_coupled, test_trl

    home = test_coupled if name in ("kto", "orpo") else test_trl
    return getattr(home, name)(FOLDER / f"trl-{RANK}", **settings)


@dataclass
class Story:
    where: Where
    make: Callable[..., Trainer] = llama
    settings: dict = field(default_factory=dict)
    world: int = 2


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
    "one row, checkpointing switched on": Story(
        {1: {0: [0.7], 1: [0.5]}}, settings={"per_device_train_batch_size": 2}
    ),
    "the only row, checkpointing switched on": Story(
        {1: {1: [0.8]}}, settings={"per_device_train_batch_size": 1, **USED}
    ),
    "all used": Story({1: {1: [0.75], 3: [0.2]}}, many_layers, USED),
    "checkpointing": Story({1: {1: [0.75], 3: [0.2]}}, settings=CHECKPOINTING),
    "no accumulation": Story({1: {0: [0.75], 1: [0.2]}}, settings={"gradient_accumulation_steps": 1}),
    "the last window short": Story(
        {1: {6: [0.7], 7: [0.2]}},
        settings={"steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 7, "train_dataset": 160},
    ),
    "tokens averaged on each rank": Story(
        {1: {1: [0.75], 2: [0.2]}}, settings={"average_tokens_across_devices": False}
    ),
    "tied": Story({1: {1: [0.75], 2: [0.2]}}, tied),
    "an expert not used by the last piece": Story({1: {1: [0.75], 2: [0.2]}}, with_expert),
    "the same, all used": Story({1: {1: [0.75], 3: [0.2]}}, with_expert, USED),
    "towers": Story({0: {2: [0.5]}, 1: {1: [0.75], 2: [0.2], 3: [0.5]}}, with_towers),
    "rows ranked": Story({0: {1: [0.3], 2: [0.5]}, 1: {0: [0.1], 1: [0.75]}}, ranking),
    "rows ranked, all used, fewer on rank 1": Story(
        {0: {3: [0.75]}, 1: {1: [0.3], 2: [0.25]}}, ranking, {"data_collator": fewer_on_rank_1, **USED}
    ),
    "towers, all used": Story({0: {3: [0.3]}, 1: {1: [0.3]}}, with_towers, USED),
    "bf16": Story({1: {1: [0.75], 2: [0.2]}}, in_bf16),
    "three ranks, two fail": Story(
        {0: {1: [0.75]}, 2: {0: [0.4], 1: [0.9], 3: [0.2]}}, many_layers, {"train_dataset": 96}, world=3
    ),
}  # fmt: skip
if importlib.util.find_spec("peft"):
    STORIES["LoRA"] = Story({1: {1: [0.75], 2: [0.2]}}, lora)
if importlib.util.find_spec("sentence_transformers"):
    for kind in ("MultipleNegativesRankingLoss", "MatryoshkaLoss"):
        where = {0: {1: [0.3], 2: [0.5]}, 1: {0: [0.1], 1: [0.75]}}
        STORIES[f"sentence-transformers, {kind}"] = Story(where, partial(by_the_library, kind))
if importlib.util.find_spec("trl"):
    for kind in ("sft", "dpo", "reward", "grpo", "rloo", "kto", "orpo"):
        settings = {"beta": 0.0} if kind == "rloo" else {}
        STORIES[f"TRL {kind}"] = Story(
            {1: {1: [0.8], 2: [0.3]}}, partial(trl_trainer, kind), settings
        )
    STORIES["TRL sft, smoothed, which calls DDP twice"] = Story(
        {0: {0: [0.2], 3: [0.45]}, 1: {1: [0.4], 2: [0.55]}},
        STORIES["TRL sft"].make,
        {"label_smoothing_factor": 0.1},
    )
    # In its pass for the baseline, behind the forward pass, and in one without gradients of a part.
    STORIES["TRL kto, elsewhere"] = Story(
        {0: {0: [0.5], 3: [0.4]}, 1: {1: [0.1], 2: [0.2], 3: [0.45]}},
        STORIES["TRL kto"].make,
        STORIES["TRL kto"].settings,
    )


def made(story: Story) -> Trainer:
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
    return next(
        n for n, s in STORIES.items() if (s.make, s.settings) == (story.make, story.settings)
    )


def facts_of(survived: Run, whole: Run, planned: int) -> dict:
    model = survived.trainer.model_wrapped
    return {
        "world": dist.get_world_size(),
        "backend": dist.get_backend(),
        "wrapper": type(model).__name__,
        "buckets": len(model.reducer._get_zeros_like_grad_buckets()),
        "find_unused": model.find_unused_parameters,
        "planned": planned,
        "failed": survived.allocations.num_failed,
        "gradients": gradients_off_by(survived, whole),
        "weights": off_by(survived.weights, whole.weights),
        "by rounding": {
            str(dtype): [
                gradients_by_rounding(survived.gradients, whole.gradients, dtype=dtype),
                weights_by_rounding(
                    survived.weights, whole.weights, len(whole.gradients), dtype=dtype
                ),
            ]
            for dtype in (torch.float32, torch.float64)
        },
        "logged": numbers_off_by(survived.logged, whole.logged),
        "num_logged": max(map(len, survived.logged)),
        "more allocations": sum(survived.num_allocations) - sum(whole.num_allocations),
        "digest": float(sum(weight.double().sum() for weight in survived.weights)).hex(),
    }


def tell(name: str) -> dict:
    story, whole = STORIES[name], whole_of(same_as(name))
    trainer = made(story)
    survive_oom(trainer)
    mine = story.where.get(RANK, {})
    fail_at = {
        n: [max(1, int(whole.num_allocations[n] * part)) for part in parts]
        for n, parts in mine.items()
    }
    return facts_of(Run(trainer, fail_at), whole, sum(map(len, fail_at.values())))


SWEEPS: dict[str, tuple[Callable[..., Trainer], dict, set[int], int]] = {
    "wherever rank 1 fails, unused ones looked for": (llama, {}, {1}, 1),
    "wherever rank 1 fails, all used": (llama, USED, {1}, 1),
    "wherever rank 1 fails, checkpointing": (llama, CHECKPOINTING, {1}, 1),
    "wherever rank 0 fails, unsynchronised": (llama, {}, {0}, 0),
    "wherever both fail, from either end": (llama, USED, {0, 1}, 1),
}
if importlib.util.find_spec("trl"):
    SWEEPS["wherever rank 1 fails, TRL sft"] = (partial(trl_trainer, "sft"), {}, {1}, 1)


def exchanges(make: Callable[..., Trainer], **settings) -> set[int]:
    """The allocations inside exchanges of metrics: which of those the others have had would not be known."""
    trainer = make(**settings)
    numbers: set[int] = set()
    exchange = trainer.accelerator.gather_for_metrics

    def gather_for_metrics(value):
        allocations: Any = _get_current_dispatch_mode()
        before = allocations.num
        answer = exchange(value)
        numbers.update(range(before + 1, allocations.num + 1))
        return answer

    trainer.accelerator.gather_for_metrics = gather_for_metrics
    Run(trainer)
    return numbers


def sweep(name: str) -> dict:
    make, settings, ranks, which = SWEEPS[name]
    num = Run(make(steps=1, **settings)).num_allocations[which]
    first = (
        1 if which else 8
    )  # in a window's first micro-batch DDP begins by exchanging its buffers
    spread = [first + (num - 3 - first) * point // POINTS for point in range(POINTS)]
    exchanged = exchanges(make, steps=1, **settings)
    points = [next(n for n in range(point, num) if n not in exchanged) for point in spread]
    points += [num - 2, num - 1, num]
    whole = Run(make(steps=len(points), **settings))
    trainer = make(steps=len(points), **settings)
    survive_oom(trainer)
    trainer.add_callback(forgetting_each_step(trainer))
    mine = points if max(ranks) == RANK else points[::-1]
    fail_at = (
        {2 * step + which: [point] for step, point in enumerate(mine)} if RANK in ranks else {}
    )
    return facts_of(Run(trainer, fail_at), whole, len(fail_at)) | {"allocations": num}


def resumed() -> dict:
    """Rank 0 learns a limit, which is in the checkpoint, and both take it up. One step, as its
    gradient needs weights only: transformers before 5 loads no optimizer on ranks of the CPU.
    """
    folder = {
        "output_dir": str(FOLDER / "saved"),
        "save_strategy": "steps",
        "save_steps": 2,
        "save_only_model": True,
    }
    rest = {**folder, "lr_scheduler_type": "constant"}
    whole = Run(llama(steps=3, **rest))
    first = llama(steps=2, **rest)
    survive_oom(first)
    first = Run(first, {0: [whole.num_allocations[0] // 2]} if RANK == 0 else {})
    second = llama(steps=3, **rest)
    survive_oom(second)
    second = Run(second, resume_from_checkpoint=str(FOLDER / "saved" / "checkpoint-2"))
    memo = memo_of(second.trainer)
    divided = min(second.num_allocations) > 1.5 * max(whole.num_allocations)
    off = off_by_steps(first.gradients + second.gradients, whole.gradients)
    return {"limit": memo.limit, "divided": divided, "gradients": off}


class Card(HalfFull):
    """On which so many tokens fit: fewer on rank 1, which has to try more often what fits."""

    num_tokens = 1000 if RANK == 0 else 100

    def refuse(self, module, args, kwargs):
        if kwargs["input_ids"].numel() > self.num_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory.")


def rehearsed() -> dict:
    """Each rank by itself, with a trainer that exchanges metrics in each pass."""
    whole, trainer, card = whole_of("TRL sft"), made(STORIES["TRL sft"]), Card()
    trainer.model.register_forward_pre_hook(card.refuse, with_kwargs=True)
    with patch("trainer_plugins.survival.memo.card_of", lambda _: card):
        survive_oom(trainer)
        facts = facts_of(Run(trainer), whole, 0)
    return facts | {"limit": memo_of(trainer).limit}


def refused(name: str) -> str:
    trainer = ranking(gathers=True) if name == GATHERS else llama()
    asked = {"comm_hook": DDPCommunicationHookType.FP16} if name == "comm_hook" else {name: True}
    if name not in ("comm_hook, late", GATHERS):
        trainer.accelerator.ddp_handler = DistributedDataParallelKwargs(**asked)
    try:
        survive_oom(trainer)
        if name == "comm_hook, late":

            def hook(_) -> None:
                trainer.model_wrapped.register_comm_hook(None, allreduce_hook)

            trainer.add_callback(at("step_begin", hook))
            trainer.train()
    except ValueError as error:
        return str(error)
    return ""


GATHERS = "gather_across_devices"
REFUSED = {
    GATHERS: "GatheringRanking with gather_across_devices compares rows of all ranks",
    "static_graph": "DDP with static_graph replays its first backward pass",
    "gradient_as_bucket_view": "DDP with gradient_as_bucket_view does not show which gradients are final",
    "comm_hook": "a DDP communication hook may run out of memory itself",
    "comm_hook, late": "a DDP communication hook may run out of memory itself",
}

if __name__ == "__main__":
    faulthandler.dump_traceback_later(processes.ENDS_A_HANG / 2, exit=True)
    gc.collect()
    gc.freeze()  # each survival collects garbage, and what was imported is a million objects
    wanted = read_wanted(FOLDER)
    told = {name: tell(name) for name in wanted if name in STORIES}
    if WORLD == 2:
        told |= {name: sweep(name) for name in SWEEPS if name in wanted}
        told |= {"rehearsed": rehearsed()} if "TRL sft" in STORIES else {}
        told |= {"resumed": resumed(), "refused": {name: refused(name) for name in REFUSED}}
    (FOLDER / f"rank-{RANK}.json").write_text(json.dumps(told))
    dist.barrier()
    os._exit(0)  # gloo now and then aborts a process at its end
