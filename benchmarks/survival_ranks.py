"""Measure on two CPU ranks the time of a batch 8 times too large, compared with a tuned one.

It starts its ranks itself. On each, a model takes 8 rows at once and no more. The time is processor
time of both, compared with a run with the micro-batch set by hand; under FSDP that one also reduces
gradients for each micro-batch, since otherwise it keeps whole gradients on each card.
"""

import json
import os
import subprocess
import sys
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from trainer_plugins import survive_oom

FEW, MANY, ROWS, FITS = 10, 40, 64, 8
WRAP = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
KINDS: dict[str, dict[str, Any]] = {
    "DDP": {},
    "FSDP1": {"fsdp": True, "fsdp_config": {"version": 1, "sync_module_states": False, **WRAP}},
    "FSDP2": {"fsdp": True, "fsdp_config": {"version": 2, **WRAP}},
}
_initialise = PartialState.__init__


def _as_multi_gpu(self: Any, *args: Any, **kwargs: Any) -> None:
    """Make accelerate take its FSDP branch, which is for accelerators only."""
    _initialise(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        self._shared_state["device"] = torch.device("cpu")


def _refuse(layer: nn.Module, args: tuple[Any, ...]) -> None:
    if len(args[0]) > FITS:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")


def model_and_rows() -> tuple[LlamaForCausalLM, torch.Tensor]:
    """Return the model and its rows: 1 M parameters and rows of 128 tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=512, num_hidden_layers=4
    )
    config.num_attention_heads = config.num_key_value_heads = 4
    rows = torch.randint(1, 127, (4 * ROWS, 128), generator=torch.Generator().manual_seed(0))
    return LlamaForCausalLM(config), rows


def seconds(kind: str, num_rows: int, num_steps: int, folder: str) -> float:
    """Train on both ranks; return their total processor time, and verify the split."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState.__init__ = _initialise if kind == "DDP" else _as_multi_gpu
    reducing = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    args = TrainingArguments(
        folder,
        max_steps=num_steps,
        per_device_train_batch_size=num_rows,
        gradient_accumulation_steps=ROWS // num_rows,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        accelerator_config=reducing if "FSDP" in kind else None,
        **KINDS[kind],
    )
    model, rows = model_and_rows()
    model.model.layers[1].register_forward_pre_hook(_refuse)
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, args, train_dataset=data)
    if num_rows > FITS:
        survive_oom(trainer, plan_first=False)
    started = process_time()
    trainer.train()
    took = torch.tensor(process_time() - started, dtype=torch.float64)
    wrapped = type(trainer.model_wrapped).__name__
    assert wrapped == {"DDP": "DistributedDataParallel", "FSDP1": "FullyShardedDataParallel"}.get(
        kind, "FSDPLlamaForCausalLM"
    ), wrapped
    dist.all_reduce(took)
    return float(took)


def measure() -> dict[str, float]:
    """Return by kind the time of the survived run, over the tuned one."""
    with TemporaryDirectory() as folder:
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        script = ["-m", "benchmarks.survival_ranks", folder]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [sys.executable, *launch, *script], env=environ, stdout=subprocess.PIPE, text=True
        )
        if done.returncode:
            raise SystemExit("the two ranks ended with an error, which stands above")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _rank(folder: str) -> None:
    figures = {}
    for kind in KINDS:
        few, many = (
            {rows: seconds(kind, rows, num, folder) for rows in (ROWS, FITS)} for num in (FEW, MANY)
        )
        a_step = {rows: (many[rows] - few[rows]) / (MANY - FEW) for rows in few}
        first = few[ROWS] - few[FITS] - FEW * (a_step[ROWS] - a_step[FITS])
        figures[f"{kind}: time of a step over that of the tuned"] = a_step[ROWS] / a_step[FITS]
        figures[f"{kind}: tuned steps that the first failure costs"] = first / a_step[FITS]
    if os.environ["RANK"] == "0":
        print(json.dumps(figures))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo occasionally aborts a process at its end


if __name__ == "__main__":
    if "RANK" in os.environ:
        _rank(sys.argv[1])
    else:
        for name, value in measure().items():
            print(f"{name}: {value:.2f}")
