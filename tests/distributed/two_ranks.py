"""A training of two ranks in which rank 1 alone has something to say.

Launched by test_two_ranks.py.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.models import tiny_llama, token_rows
from trainer_plugins import CudaCacheCallback, EvalGenerateCleanup, KVCacheGuard, MemoryWatchdog
from trainer_plugins.testing import simgpu
from trainer_plugins.units import MIB
from trainer_plugins.upkeep.agreement import Agreement

RANK = int(os.environ["RANK"])
FOLDER, STORY = Path(sys.argv[1]), sys.argv[2]
SIMGPU = simgpu.is_enabled()


class OnlyRankOne(TrainerCallback):
    """Rank 1 caches 64 MiB in each step; in the story `hold` a stranger presses on rank 0; in `stop` it runs full."""

    def on_step_begin(self, args, state, control, **kwargs):
        if RANK == 1 and SIMGPU:
            mib = 250 if STORY == "stop" and state.global_step == 3 else 64
            torch.zeros(mib * MIB, dtype=torch.uint8, device=args.device)
        if (
            RANK == 0 and state.global_step == 5
        ):  # a preview, as people write it: no vote may wait for rank 1
            kwargs["model"].generate(
                torch.ones(1, 4, dtype=torch.long, device=args.device), max_new_tokens=2
            )
        if RANK == 0 and STORY == "hold" and state.global_step == 3:
            simgpu.card().hold(4242, 100 * MIB, "python infer.py")


class OnlyRankOneEvaluates(Trainer):
    """As clients do it who evaluate beside the training, on one card; what that caches is this rank's alone."""

    def evaluate(self, *args, **kwargs):
        if RANK == 1:
            torch.zeros(64 * MIB, dtype=torch.uint8, device=self.args.device)
            self.callback_handler.on_evaluate(self.args, self.state, self.control, {})
        return {}


callbacks: list[TrainerCallback] = [
    OnlyRankOne(), CudaCacheCallback(interval=2), EvalGenerateCleanup(), KVCacheGuard(),
    MemoryWatchdog(stop=STORY == "stop", prometheus_dir=FOLDER / "prometheus"),
]  # fmt: skip
if STORY == "evaluate":
    callbacks = [EvalGenerateCleanup()]
args = TrainingArguments(
    str(FOLDER), max_steps=12 if STORY == "evaluate" else 8, per_device_train_batch_size=2, report_to="none",
    disable_tqdm=True, save_strategy="no", eval_strategy="steps", eval_steps=4, logging_steps=4,
    dataloader_pin_memory=False, use_cpu=not SIMGPU,
)  # fmt: skip
trainer_class = OnlyRankOneEvaluates if STORY == "evaluate" else Trainer
trainer = trainer_class(
    tiny_llama(), args, train_dataset=token_rows(), eval_dataset=token_rows(4), callbacks=callbacks
)
trainer.train()

alone = Agreement(timeout_seconds=1.0)
answer = alone.highest(1) if RANK == 0 else None  # rank 1 never answers
facts = {
    "world_size": dist.get_world_size(),
    "model": type(trainer.model_wrapped).__name__,
    "device": next(trainer.model.parameters()).device.type,
    "step": trainer.state.global_step,
    "answer_without_rank_1": answer,
    "weights": float(sum(p.detach().double().sum() for p in trainer.model.parameters())),
}
(FOLDER / f"facts-{RANK}.json").write_text(json.dumps(facts))
sys.stdout.flush()
os._exit(0)  # rank 1 must not wait for a group that rank 0 gave up
