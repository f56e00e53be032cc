"""ZeRO on two ranks: micro-batches whole and divided by the plan, and at the end one that fails.

For test_zero.py.
"""

import gc
import json
import math
import os
import sys
import threading
from contextvars import ContextVar
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from deepspeed.utils import safe_get_full_grad
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tests import processes
from tests.models import tiny_llama
from tests.survival.failing import (
    Run,
    gradients_by_rounding,
    know_limit,
    off_by,
    off_by_steps,
    packed,
    padded,
    ragged_rows,
    small_trainer,
    weights_by_rounding,
)
from tests.survival.ranks.token_card import TokenCard
from tests.wanted import read_wanted
from trainer_plugins import survive_oom
from trainer_plugins.survival import memo as survival_memo
from trainer_plugins.survival.attempt.attempt import CardReader as RealCard
from trainer_plugins.survival.certificate.certificate import Certificate
from trainer_plugins.survival.memo import SurvivalMemo
from trainer_plugins.survival.ranks import zero

FOLDER = Path(sys.argv[1])
RANK = int(os.environ["RANK"])
WHOLE = {
    "stage3_param_persistence_threshold": 0,
    "reduce_bucket_size": 20_000,
    "allgather_bucket_size": 20_000,
}
STORIES: dict[str, dict] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2, "overlap_comm": True},
    "zero3": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
}


NVME = {"device": "nvme", "nvme_path": str(FOLDER)}
REFUSED: dict[str, dict] = {
    "no ZeRO": {"stage": 0},
    "NVMe": {"stage": 3, "offload_param": NVME},
    "ZeRO++": {"stage": 3, "zero_hpz_partition_size": 2},
}


# Survival takes back what a user's code has counted in a list, but does not see into these.
MEASURING = ContextVar("measuring", default=False)
CARD: ContextVar[TokenCard | None] = ContextVar("card", default=None)
measure = Certificate.measure


def watched(*args, **kwargs):
    MEASURING.set(True)
    try:
        return measure(*args, **kwargs)
    finally:
        MEASURING.set(False)


Certificate.measure = watched  # type: ignore[method-assign]
for module in (survival_memo, zero):
    module.card_of = lambda _: CARD.get() or RealCard(None)  # type: ignore[attr-defined]


def uneven(rows):
    """Now and then rank 1 has two rows where rank 0 has four: fewer than there are pieces."""
    return padded(rows[:2] if RANK == 1 and len(rows[0]["input_ids"]) % 2 else rows)


def flat(rows):
    """One row of several sequences; now and then rank 1 has one alone, which does not lie so."""
    return packed(rows[:1] if RANK == 1 and len(rows[0]["input_ids"]) % 2 else rows)


class BeforeTheStep(TrainerCallback):
    """The gradients that each step is made of, and the micro-batches and pieces of it: rows and padded length."""

    def __init__(self, trainer) -> None:
        self.trainer = trainer
        self._kept: ContextVar[tuple[list, list, list]] = ContextVar("kept")
        self._kept.set(([], [], []))
        step = trainer.training_step
        trainer.training_step = lambda model, inputs, *rest: (
            self.note(inputs),
            step(model, inputs, *rest),
        )[1]

    @property
    def gradients(self) -> list[list[torch.Tensor]]:
        return self._kept.get()[0]

    @property
    def micro_batches(self) -> list[list[int]]:
        return self._kept.get()[1]

    @property
    def pieces(self) -> list[list[list[int]]]:
        return self._kept.get()[2]

    def note(self, inputs):
        self.micro_batches.append(list(inputs["input_ids"].shape))
        self.pieces.append([])

    def on_train_begin(self, args, state, control, **kwargs):
        self.engine = self.trainer.model_wrapped
        step = self.engine.step

        def noted(*positional, **named):
            self.gradients.append(
                [safe_get_full_grad(p).clone() for p in self.engine.module.parameters()]
            )
            return step(*positional, **named)

        self.engine.step = noted
        # Of all modules: survival looks at what hooks of the model keep, and this is no user's.
        self.hook = register_module_forward_pre_hook(self.count)
        self.embeddings = self.engine.module.get_input_embeddings()

    def on_train_end(self, args, state, control, **kwargs):
        self.hook.remove()

    def count(self, module, args):
        if module is not self.embeddings or MEASURING.get():  # whether a few short examples add up
            return
        (ids,) = args
        if card := CARD.get():
            card.holds(ids.numel())
            assert card.peak_bytes <= card.total_bytes, "no try may fail"
        if self.pieces:
            self.pieces[-1].append(list(ids.shape))


def make(folder: Path, stage: dict, attach: bool | str = True, collate=uneven):
    """Without a cache, through which transformers before 5 lets packed sequences look at each other."""
    AcceleratorState._reset_state()
    unset_hf_deepspeed_config()
    gc.collect()
    names = (
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "train_batch_size",
        "gradient_clipping",
    )
    config = {"zero_optimization": {**WHOLE, **stage}, **dict.fromkeys(names, "auto")}
    trainer = small_trainer(
        folder, tiny_llama(use_cache=False), steps=4, deepspeed={**config, "zero_force_ds_cpu_optimizer": False},
        save_strategy="steps", save_steps=2, max_grad_norm=0.5, train_dataset=ragged_rows(48), data_collator=collate,
    )  # fmt: skip
    if attach:
        survive_oom(trainer, on_refusal="error" if attach is True else attach)
    return trainer


def trained(
    folder: Path,
    stage: dict,
    attach: bool | str = True,
    resume: str | None = None,
    limit=math.inf,
    collate=uneven,
):
    trainer = make(folder, stage, attach, collate)
    if attach and limit < math.inf:
        know_limit(trainer, limit)
    seen = BeforeTheStep(trainer)
    trainer.add_callback(seen)
    trainer.train(resume_from_checkpoint=resume)
    dist.barrier()
    return trainer, seen


def weights(folder: Path) -> list[torch.Tensor]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    kept = get_fp32_state_dict_from_zero_checkpoint(str(folder / "checkpoint-4"))
    return [weight.detach() for weight in kept.values()]


def know_a_limit(checkpoint: Path, limit: int) -> None:
    """As a run that could count its memory would have left it."""
    if RANK == 0:
        file = checkpoint / "trainer_state.json"
        kept = json.loads(file.read_text())
        kept["stateful_callbacks"]["SurvivalMemo"]["attributes"]["limit"] = limit
        file.write_text(json.dumps(kept))
    dist.barrier()


def logged(trainer, name: str) -> list[float]:
    return [logs[name] for logs in trainer.state.log_history if name in logs]


def told(name: str, config: dict) -> dict:
    folder = FOLDER / name.replace(" ", "_")
    _, plain_seen = trained(folder / "plain", config, attach=False)
    whole, whole_seen = trained(folder / "whole", config)
    expected = weights(folder / "whole")
    attached = [
        off_by(expected, weights(folder / "plain")),
        off_by_steps(whole_seen.gradients, plain_seen.gradients),
    ]
    dist.barrier()
    know_a_limit(folder / "whole" / "checkpoint-2", 30)
    divided, seen = trained(folder / "whole", config, resume=str(folder / "whole" / "checkpoint-2"))
    divided_weights = weights(folder / "whole")
    dist.barrier()
    CARD.set(TokenCard(RANK))
    rehearsed, rehearsed_seen = trained(folder / "rehearsed", config)
    CARD.set(None)
    engine = seen.engine
    return {
        "world_size": dist.get_world_size(), "backend": dist.get_backend(),
        "wrapped": type(divided.model_wrapped).__name__, "stage": int(engine.zero_optimization_stage()),
        "offloaded": engine.zero_offload_param() is not None,
        "num_elsewhere": sum(getattr(p, "ds_numel", p.numel()) - p.numel() for p in engine.module.parameters()),
        "attached": attached,
        "gradients": gradients_by_rounding(seen.gradients, whole_seen.gradients[2:]),
        "weights": weights_by_rounding(divided_weights, expected, steps=2),
        "rehearsed": [gradients_by_rounding(rehearsed_seen.gradients, whole_seen.gradients),
                      weights_by_rounding(weights(folder / "rehearsed"), expected, steps=4)],
        "limit": next(c.limit for c in rehearsed.callback_handler.callbacks if isinstance(c, SurvivalMemo)),
        "rehearsed_pieces": rehearsed_seen.pieces,
        "micro_batches": seen.micro_batches, "pieces": seen.pieces,
        "whole_pieces": [whole_seen.micro_batches, whole_seen.pieces],
        "counters": [[e.global_steps, e.micro_steps + before, e.global_samples]
                     for e, before in ((engine, 2), (whole_seen.engine, 0))],
        "norms": [logged(divided, "grad_norm"), logged(whole, "grad_norm")],
        "losses": [logged(divided, "loss"), logged(whole, "loss")],
    }  # fmt: skip


def flattened() -> dict:
    """With the limit that another run would have left."""
    stage = {"stage": 2}
    _, whole = trained(FOLDER / "flat", stage, attach=False, collate=flat)
    _, divided = trained(FOLDER / "flat", stage, limit=25, collate=flat)
    pieces = [len(one) for one in divided.pieces]
    return {
        "gradients": gradients_by_rounding(divided.gradients, whole.gradients),
        "pieces": pieces,
    }


def on_one_rank() -> dict:
    """Survival has a limit by which it would divide, and the other rank does not know of it."""
    attach = "warn" if RANK == 0 else False
    trainer, seen = trained(FOLDER / "alone", {"stage": 2}, attach=attach, limit=25, collate=flat)
    return {"steps": trainer.state.global_step, "pieces": [len(one) for one in seen.pieces]}


def refused(stage: dict) -> str:
    try:
        make(FOLDER / "refused", stage)
    except ValueError as error:
        return str(error)
    return ""


def fail() -> None:
    """In the third step, on rank 1 alone, whose script then goes on for as long as it likes."""
    trainer = make(FOLDER / "failing", {"stage": 3})
    try:
        Run(trainer, {4: [300]} if RANK == 1 else {})
    except torch.OutOfMemoryError as error:
        (FOLDER / "said.txt").write_text(str(error))
        threading.Event().wait(processes.ENDS_A_HANG)


if __name__ == "__main__":
    facts = {"refused": {name: refused(stage) for name, stage in REFUSED.items()}}
    facts["flattened"] = flattened()
    facts["on one rank"] = on_one_rank()
    for name in read_wanted(FOLDER):
        facts[name] = told(name, STORIES[name])
    (FOLDER / f"rank-{RANK}.json").write_text(json.dumps(facts))
    fail()
