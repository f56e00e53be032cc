"""Load a model and train one step on one of two CPU ranks; write its peak of main memory.

By hand, for docs/internals/plans.md: `host_ranks.py FOLDER CHECKPOINT LAUNCH`, with the fields of
TrainingArguments as JSON.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import deepspeed
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

initialise = PartialState.__init__


def initialise_as_multi_gpu(self: Any, *args: Any, **kwargs: Any) -> None:
    """Make accelerate take its FSDP branch, which is for accelerators only."""
    initialise(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def of_status(name: str) -> int:
    """Return the kernel's figure for this process: VmHWM is its peak, RssAnon excludes files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


class Peak(threading.Thread):
    """Samples anonymous memory: the pages of files are dropped when memory is short."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.num_bytes, self.is_over = 0, threading.Event()

    def run(self) -> None:
        while not self.is_over.wait(0.002):
            self.num_bytes = max(self.num_bytes, of_status("RssAnon"))


class AtBegin(TrainerCallback):
    """Records the peak once everything is loaded and sharded, before the first step."""

    def __init__(self, told: dict[str, object], peak: Peak) -> None:
        self.told, self.peak = told, peak

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.told["prepared"] = of_status("VmHWM")
        self.told["prepared_anon"] = self.peak.num_bytes


def main(folder: Path, checkpoint: str, fields: dict[str, Any]) -> None:
    """Load, train one step, and write the peaks of this rank."""
    told: dict[str, object] = {
        "imported": of_status("VmRSS"),
        "imported_anon": of_status("RssAnon"),
    }
    if "fsdp" in fields:
        PartialState.__init__ = initialise_as_multi_gpu
    peak = Peak()
    peak.start()
    args = TrainingArguments(
        str(folder), max_steps=1, per_device_train_batch_size=1, bf16=True, use_cpu=True,
        report_to="none", save_strategy="no", disable_tqdm=True, optim="adamw_torch", **fields,
    )  # fmt: skip
    if "deepspeed" in fields:
        deepspeed.init_distributed("gloo")
    told["arguments"] = of_status("VmHWM")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    told["loaded"], told["loaded_anon"] = of_status("VmHWM"), peak.num_bytes
    row = {name: torch.ones(16, dtype=torch.long) for name in ("input_ids", "labels")}
    trainer = Trainer(
        model=model, args=args, train_dataset=[row] * 4, callbacks=[AtBegin(told, peak)]
    )
    trainer.train()
    peak.is_over.set()
    told["wrapped"] = type(trainer.model_wrapped).__name__
    told["trained"], told["trained_anon"] = of_status("VmHWM"), peak.num_bytes
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)  # gloo occasionally aborts a process at its end


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
