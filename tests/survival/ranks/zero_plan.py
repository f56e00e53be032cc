"""ZeRO on two ranks, with micro-batches whole and divided by the plan. Launched by test_zero.py."""

import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from deepspeed.utils import safe_get_full_grad
from transformers import TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tests.models import tiny_llama
from tests.survival.failing import off_by, off_by_steps, padded, ragged_rows, small_trainer
from trainer_plugins import survive_oom

FOLDER = Path(sys.argv[1])
RANK = int(os.environ["RANK"])
STORIES = {
    "zero1": {"stage": 1},
    "zero1 overlapped": {"stage": 1, "overlap_comm": True},
    "zero2": {"stage": 2},
    "zero2 offloaded": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "zero3": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero3 offloaded": {
        "stage": 3, "stage3_param_persistence_threshold": 0,
        "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"},
    },
}  # fmt: skip


class BeforeTheStep(TrainerCallback):
    """The gradients that each step is made of, and how often the model was called for it."""

    def __init__(self) -> None:
        self.gradients, self.calls = [], []

    def on_train_begin(self, args, state, control, **kwargs):
        self.engine = self.trainer.model_wrapped
        step, self.num_calls = self.engine.step, 0

        def noted(*positional, **named):
            self.gradients.append([safe_get_full_grad(p).clone() for p in self.engine.module.parameters()])
            self.calls.append(self.num_calls)
            self.num_calls = 0
            return step(*positional, **named)

        self.engine.step = noted
        self.engine.module.register_forward_pre_hook(self.count)

    def count(self, *_):
        self.num_calls += self.engine.module.training


def trained(folder: Path, zero: dict, attach: bool, resume: str | None = None, **kwargs):
    AcceleratorState._reset_state()
    unset_hf_deepspeed_config()
    gc.collect()
    config = {
        "zero_optimization": {"reduce_bucket_size": 20_000, "allgather_bucket_size": 20_000, **zero},
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "train_batch_size": "auto",
        "gradient_clipping": "auto", "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    trainer = small_trainer(
        folder, tiny_llama(), steps=4, deepspeed=config, save_strategy="steps", save_steps=2, max_grad_norm=0.5,
        train_dataset=ragged_rows(48), **kwargs,
    )  # fmt: skip
    if attach:
        survive_oom(trainer)
    seen = BeforeTheStep()
    seen.trainer = trainer
    trainer.add_callback(seen)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, seen


def weights(folder: Path) -> list[torch.Tensor]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return list(get_fp32_state_dict_from_zero_checkpoint(str(folder / "checkpoint-4")).values())


def know_a_limit(checkpoint: Path, limit: int) -> None:
    """As a run that could count its memory would have left it."""
    file = checkpoint / "trainer_state.json"
    kept = json.loads(file.read_text())
    kept["stateful_callbacks"]["SurvivalMemo"]["attributes"]["limit"] = limit
    file.write_text(json.dumps(kept))


def told(name: str, zero: dict) -> dict:
    folder = FOLDER / name.replace(" ", "_")
    whole, whole_seen = trained(folder / "whole", zero, attach=True)
    plain, plain_seen = trained(folder / "plain", zero, attach=False)
    checkpoint = folder / "whole" / "checkpoint-2"
    dist.barrier()
    expected = weights(folder / "whole")
    without_us = off_by(expected, weights(folder / "plain"))
    if RANK == 0:
        know_a_limit(checkpoint, 30)
    dist.barrier()
    divided, seen = trained(folder / "whole", zero, attach=True, resume=str(checkpoint))
    dist.barrier()
    engines = [one.engine for one in (seen, whole_seen)]
    return {
        "world_size": dist.get_world_size(), "backend": dist.get_backend(),
        "wrapped": type(divided.model_wrapped).__name__, "stage": seen.engine.zero_optimization_stage(),
        "optimizer": type(seen.engine.optimizer).__name__,
        "offload": [str(seen.engine.zero_offload_optimizer() is not None), str(seen.engine.zero_offload_param() is not None)],
        "partitioned": sum(getattr(p, "ds_numel", 0) - p.numel() for p in seen.engine.module.parameters()),
        "gradients": off_by_steps(seen.gradients, whole_seen.gradients[2:]),
        "weights": off_by(weights(folder / "whole"), expected),
        "attached_weights": without_us, "attached_gradients": off_by_steps(whole_seen.gradients, plain_seen.gradients),
        "calls": seen.calls, "whole_calls": whole_seen.calls,
        "counters": [[e.global_steps, e.micro_steps, e.global_samples] for e in engines],
        "norms": [[logs["grad_norm"] for logs in one.state.log_history if "grad_norm" in logs] for one in (divided, whole)],
        "losses": [[logs["loss"] for logs in one.state.log_history if "loss" in logs] for one in (divided, whole)],
    }  # fmt: skip


if __name__ == "__main__":
    facts = {}
    for name in sys.argv[2:] or STORIES:
        facts[name] = told(name, STORIES[name])
    (FOLDER / f"rank-{RANK}.json").write_text(json.dumps(facts))
    sys.stdout.flush()
    os._exit(0)  # gloo now and then aborts a process that ends in the usual way
