"""Trainings on two ranks that are rehearsed, and one that is not, under one kind of wrapper.

Launched by test_rehearsed_ranks.py: its folder and the kind.
"""

import copy
import dataclasses
import gc
import json
import os
import random
import sys
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from transformers import TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tests.models import tiny_llama
from tests.survival.failing import padded, ragged_rows, small_trainer
from trainer_plugins import Rehearsal, RehearsalError
from trainer_plugins.reading import MemoryReading

FOLDER, KIND = Path(sys.argv[1]), sys.argv[2]
RANK = int(os.environ["RANK"])
if KIND == "fsdp2":
    from tests.survival.ranks import fsdp_ranks  # noqa: F401 - two gloo ranks count as GPUs

ZERO_3 = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0,
                          "stage3_gather_16bit_weights_on_model_save": True},
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "train_batch_size": "auto",
    "gradient_clipping": "auto", "zero_force_ds_cpu_optimizer": False,
}  # fmt: skip


class Card:
    """On which a token takes 1 MB: two rows of 16 fit where it is small."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens, self.peak = num_tokens, 0

    def refuse(self, module, args, kwargs):
        num = kwargs["input_ids"].numel()
        if num > self.num_tokens:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num} MiB.")
        self.peak = max(self.peak, num)

    def read(self) -> MemoryReading:
        return MemoryReading(
            device="cpu",
            total_bytes=self.num_tokens * 10**6,
            free_bytes=self.num_tokens * 10**6,
            reserved_bytes=0,
            allocated_bytes=0,
            peak_allocated_bytes=self.peak * 10**6,
        )

    def allocated_bytes(self) -> int:
        return 0

    def reset_peak(self) -> None:
        self.peak = 0

    def release_cached(self) -> None:
        pass


class Sees(TrainerCallback):
    """All that a rehearsal must leave as it was, when training begins."""

    def __init__(self) -> None:
        self.seen: dict[str, object] = {}

    def on_train_begin(self, args, state, control, model=None, lr_scheduler=None, **kwargs):
        local = [
            getattr(p, "ds_tensor", getattr(p, "_local_tensor", p)) for p in model.parameters()
        ]
        self.seen = {
            "weights": [each.detach().clone() for each in local],
            "gradients": [p.grad for p in model.parameters()],
            "buffers": [b.clone() for b in model.buffers()],
            "modes": [module.training for module in model.modules()],
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False)["state"]["key"].tolist(),
            "torch": torch.get_rng_state(),
            "scheduler": {k: v for k, v in lr_scheduler.state_dict().items() if k != "_get_lr"},
            "output_dir": args.output_dir,
            "state": copy.deepcopy(dataclasses.asdict(state)),
        }


def equal(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return repr(one) == repr(other)


def trained(folder: Path, num_tokens: int = 0, refuse_on: Literal["error"] | None = None) -> dict:
    """Train four steps, with a rehearsal if there is a card.

    Returns what was seen before and after it, what it said, and the weights at the end.
    """
    AcceleratorState._reset_state()
    unset_hf_deepspeed_config()
    gc.collect()
    before, after, rehearsal = Sees(), Sees(), Rehearsal(refuse_on=refuse_on)
    trainer = small_trainer(
        folder, tiny_llama(use_cache=False, attention_dropout=0.2), steps=4, train_dataset=ragged_rows(64),
        data_collator=padded, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2,
        eval_dataset=ragged_rows(16), per_device_eval_batch_size=4, weight_decay=0.1, **({"deepspeed": ZERO_3} if KIND == "zero3" else {}),
    )  # fmt: skip
    card = Card(num_tokens) if num_tokens else None
    for each in (before, *([rehearsal] if card else []), after):
        trainer.add_callback(each)
    torch.manual_seed(RANK)
    refused = ""
    with (
        patch("trainer_plugins.survival.rehearsal.callback.card_of", lambda _: card),
        patch("trainer_plugins.survival.ranks.zero.card_of", lambda _: card),
    ):
        hook = card and trainer.model.register_forward_pre_hook(card.refuse, with_kwargs=True)
        end = card and trainer.add_callback(TakesOff(hook))
        try:
            trainer.train()
        except RehearsalError as error:
            refused = str(error)
    dist.barrier()
    del end
    return {
        "wrapped": type(trainer.model_wrapped).__name__,
        "step": trainer.state.global_step,
        "changed": [name for name, seen in after.seen.items() if not equal(before.seen[name], seen)],
        "kept": sorted(path.name for path in folder.iterdir()),
        "refused": refused,
        "moments": {each.moment: each.failure for each in rehearsal.report.moments},
        "left_out": dict(rehearsal.report.left_out),
        "losses": [logs["loss"] for logs in trainer.state.log_history if "loss" in logs],
        "eval": [logs["eval_loss"] for logs in trainer.state.log_history if "eval_loss" in logs],
        "weights": weights(folder),
    }  # fmt: skip


class TakesOff(TrainerCallback):
    """The card is small for the rehearsal alone."""

    def __init__(self, hook) -> None:
        self.hook = hook

    def on_train_begin(self, args, state, control, **kwargs):
        self.hook.remove()


def weights(folder: Path) -> list[torch.Tensor]:
    """Those of the last checkpoint, as each kind writes them."""
    file = folder / "checkpoint-4" / "model.safetensors"
    if not file.is_file():
        return []
    from safetensors.torch import load_file

    return [each for _, each in sorted(load_file(file).items())]


def main() -> None:
    plain = trained(FOLDER / "plain")
    facts: dict[str, object] = {}
    for name, num_tokens in (("fits", 10_000), ("small", 10_000 if RANK == 0 else 40)):
        told = trained(FOLDER / name, num_tokens)
        told["same"] = [
            len(plain["weights"]) > 0 and equal(told["weights"], plain["weights"]),
            told["losses"] == plain["losses"],
            told["eval"] == plain["eval"],
        ]
        del told["weights"]
        facts[name] = told
    if KIND == "ddp":
        refused = trained(FOLDER / "refused", 10_000 if RANK == 0 else 40, refuse_on="error")
        del refused["weights"]
        facts["refused"] = refused
    facts["world"] = [dist.get_world_size(), dist.get_backend()]
    (FOLDER / f"rank-{RANK}.json").write_text(json.dumps(facts))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo now and then aborts a process at its end


if __name__ == "__main__":
    main()
