"""A training of two ranks in which rank 1 alone has a fault. Launched by test_preflight.py."""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.models import tiny_llama, token_rows
from trainer_plugins import Preflight, PreflightError

RANK = int(os.environ["RANK"])
FOLDER, HAS_FAULT = Path(sys.argv[1]), sys.argv[2] == "fault"


class OnlyRankOne(TrainerCallback):
    """Leaves rank 1 with weights that have no bytes."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if RANK == 1 and HAS_FAULT:
            model.extra = torch.nn.Linear(8, 8, device="meta")


args = TrainingArguments(
    str(FOLDER), max_steps=1, per_device_train_batch_size=2, report_to="none", disable_tqdm=True,
    save_strategy="no", use_cpu=True, logging_strategy="no",
)  # fmt: skip
trainer = Trainer(
    tiny_llama(), args, train_dataset=token_rows(), callbacks=[OnlyRankOne(), Preflight("error")]
)
refusal = ""
try:
    trainer.train()
except PreflightError as error:
    refusal = str(error)
facts = {"refusal": refusal, "step": trainer.state.global_step, "world_size": args.world_size}
(FOLDER / f"facts-{RANK}.json").write_text(json.dumps(facts))
os._exit(0)  # gloo now and then aborts a process at its end
