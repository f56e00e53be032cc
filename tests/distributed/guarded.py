"""A training of two ranks with FSDP2, on cards on which a step fits: is it resumed, is it evaluated?

Launched by test_guards.py.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.models import tiny_llama, token_rows
from trainer_plugins import EvaluationGuard, ResumeGuard
from trainer_plugins.testing import simgpu
from trainer_plugins.units import MIB

RANK = int(os.environ["RANK"])
FOLDER = Path(sys.argv[1])
ROOMY_BYTES, STEP_BYTES = 1024 * MIB, 76 * MIB


class Peak(Trainer):
    """Tells what the load of the optimizer takes of the card."""

    loaded_bytes = 0

    def _load_optimizer_and_scheduler(self, checkpoint):
        torch.accelerator.reset_peak_memory_stats()
        super()._load_optimizer_and_scheduler(checkpoint)
        self.loaded_bytes = torch.accelerator.max_memory_allocated()


def make(steps: int, *callbacks: TrainerCallback) -> Peak:
    wrapped = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    args = TrainingArguments(
        str(FOLDER), max_steps=steps, per_device_train_batch_size=1, report_to="none", fsdp=True,
        save_strategy="steps", save_steps=1, logging_strategy="no", disable_tqdm=True,
        dataloader_pin_memory=False, fsdp_config={"state_dict_type": "SHARDED_STATE_DICT", **wrapped},
    )  # fmt: skip
    sizes = {"hidden_size": 96, "intermediate_size": 384, "num_hidden_layers": 56}
    model = tiny_llama(**sizes, vocab_size=2000)
    rows = {"train_dataset": token_rows(), "eval_dataset": token_rows(128)}
    return Peak(model, args, callbacks=list(callbacks), **rows)


def total(trainer: Trainer) -> float:
    parameters: list[Any] = list(trainer.model.parameters())
    return float(sum(each.to_local().double().sum() for each in parameters))


def resumed(*callbacks: TrainerCallback) -> tuple[Peak, dict[str, Any]]:
    """Resume after one step, on a card on which a step fits."""
    trainer, error = make(2, *callbacks), ""
    torch.accelerator.empty_cache()
    simgpu.set_capacity(STEP_BYTES)
    try:
        trainer.train(resume_from_checkpoint=str(FOLDER / "checkpoint-1"))
    except torch.OutOfMemoryError as raised:
        error = type(raised).__name__
    simgpu.set_capacity(ROOMY_BYTES)
    weights, loaded = total(trainer), trainer.loaded_bytes // MIB
    return trainer, {"error": error, "weights": weights, "loaded_mib": loaded}


def evaluated(trainer: Trainer, free_bytes: int) -> dict[str, Any]:
    taken: list[str] = []

    def accuracy(prediction: Any) -> dict[str, float]:
        taken.append(type(prediction.predictions).__name__)
        words = np.argmax(prediction.predictions, axis=-1)
        return {
            "accuracy": float((words == prediction.label_ids).mean()),
            "sum": float(words.sum()),
        }

    trainer.compute_metrics = accuracy
    torch.accelerator.empty_cache()
    simgpu.set_capacity(torch.accelerator.memory_reserved() + free_bytes)
    found: dict[str, Any] = trainer.evaluate()
    simgpu.set_capacity(ROOMY_BYTES)
    metrics = {name: found[name] for name in ("eval_loss", "eval_accuracy", "eval_sum")}
    return {**metrics, "taken": taken}


simgpu.set_capacity(STEP_BYTES)
trainer = make(2)
trainer.train()
facts: dict[str, Any] = {"whole": total(trainer), "model": type(trainer.model).__name__}
for story, callbacks in {
    "bare": [],
    "guarded": [ResumeGuard(), EvaluationGuard(logits_to="argmax")],
}.items():
    del trainer
    gc.collect()
    torch.accelerator.empty_cache()
    trainer, facts[story] = resumed(*callbacks)
facts["all logits"] = evaluated(trainer, ROOMY_BYTES)
facts["argmax"] = evaluated(trainer, 40 * MIB)
facts["world_size"] = dist.get_world_size()
(FOLDER / f"facts-{RANK}.json").write_text(json.dumps(facts))
os._exit(0)  # gloo now and then aborts a process at its end
