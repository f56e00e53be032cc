"""Train under DDP and FSDP2 on real ranks, and note what they send each other.

Launched by test_ranks.py.

accelerate takes its FSDP branch for accelerators only, and calls two gloo ranks MULTI_CPU
(accelerate/state.py).
"""

import json
import os
import pickle
import sys
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from transformers import Trainer, TrainingArguments

from tests.models import tiny_llama, token_rows
from trainer_plugins.planner.rehearse.gather import request_of

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 1024}
initialise = PartialState.__init__
try:
    import peft
except ImportError:
    peft = None


def initialise_as_multi_gpu(self, *args, **kwargs):
    initialise(self, *args, **kwargs)
    if "ACCELERATE_USE_FSDP" in os.environ and self.distributed_type == DistributedType.MULTI_CPU:
        self._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def make(folder: Path, model=None, **arguments) -> Trainer:
    AcceleratorState._reset_state()
    settings = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "use_cpu": True,
        "save_strategy": "no",
    }
    quiet = {
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "dataloader_pin_memory": False,
    }
    args = TrainingArguments(output_dir=str(folder), **settings, **quiet, **arguments)
    model = tiny_llama(**WIDE) if model is None else model
    return Trainer(model=model, args=args, train_dataset=token_rows())


def asked(trainer: Trainer) -> bytes:
    """What plan_run sends to its subprocess; of the same run on cards."""
    trainer.args.use_cpu = False
    try:
        return pickle.dumps(request_of(trainer, None, "", None, None))
    finally:
        trainer.args.use_cpu = True


def num_bytes(tensor) -> int:
    return tensor.numel() * tensor.element_size()


def ddp(folder: Path, **arguments) -> tuple[dict, bytes]:
    trainer = make(folder, ddp_bucket_cap_mb=1, **arguments)
    request = asked(trainer)
    trainer.train()
    model = trainer.model_wrapped
    said = model._get_ddp_logging_data()
    rebuilt = said.get("rebuilt_bucket_sizes") or said["bucket_sizes"]
    return {
        "wrapped": type(model).__name__,
        "first": [int(size) for size in said["bucket_sizes"].split(",")],
        "buckets": [int(size) for size in rebuilt.split(",")],
    }, request


def adapter(folder: Path, **arguments) -> str:
    """What such a run says that trains an adapter on a base that PEFT has prepared as a quantised one."""
    model = tiny_llama()
    model.is_loaded_in_4bit = True
    model = peft.prepare_model_for_kbit_training(model)
    model.is_loaded_in_4bit = False  # the Trainer asks for a card else
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    trainer = make(folder, model, **arguments)
    try:
        trainer.train()
    except RuntimeError as error:
        return str(error)
    return f"{trainer.state.global_step} steps of {type(trainer.model_wrapped).__name__}"


NON_REENTRANT = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}


def fsdp2(folder: Path, **arguments) -> tuple[dict, bytes]:
    trainer = make(folder, **arguments)
    request = asked(trainer)
    sent: dict[str, list[int]] = {"gathered": [], "unsharded": [], "reduced": [], "gradients": []}
    gather, copy_out, reduce = (
        getattr(_fsdp_param_group, name)
        for name in ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce")
    )

    def gathered(*args, **kwargs):
        result = gather(*args, **kwargs)
        sent["gathered"].append(num_bytes(result.all_gather_output))
        return result

    def copied_out(result, params, *args, **kwargs):
        copy_out(result, params, *args, **kwargs)
        sent["unsharded"] += [
            num_bytes(output) for each in params for output in each.all_gather_outputs
        ]

    def reduced(params, *args, **kwargs):
        result = reduce(params, *args, **kwargs)
        sent["reduced"].append(num_bytes(result[0]))
        sent["gradients"].append(
            params[0].sharded_param.grad._local_tensor.untyped_storage().nbytes()
        )
        return result

    with (
        patch.object(_fsdp_param_group, "foreach_all_gather", gathered),
        patch.object(_fsdp_param_group, "foreach_all_gather_copy_out", copied_out),
        patch.object(_fsdp_param_group, "foreach_reduce", reduced),
    ):
        trainer.train()
    local = [parameter._local_tensor for parameter in trainer.model.parameters()]
    states = trainer.optimizer.optimizer.state.values()
    return {
        **sent,
        "wrapped": type(trainer.model).__name__,
        "weights": sum(map(num_bytes, local)),
        "states": sum(
            num_bytes(value._local_tensor)
            for state in states
            for value in state.values()
            if value.ndim
        ),
    }, request


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    PartialState.__init__ = initialise_as_multi_gpu
    cases = {
        "fsdp2": lambda: fsdp2(folder),
        "fsdp2, accumulation": lambda: fsdp2(folder, gradient_accumulation_steps=3),
        "ddp": lambda: ddp(folder, ddp_find_unused_parameters=False),
        "ddp, unused": lambda: ddp(folder, ddp_find_unused_parameters=True),
    }
    if int(os.environ["WORLD_SIZE"]) > 2:
        cases = {"hsdp": cases["fsdp2"]}
    facts, requests = {}, {}
    for name, run in cases.items():
        if name == "ddp":
            del os.environ["ACCELERATE_USE_FSDP"]
        facts[name], requests[name] = run()
        facts[name] |= {"world_size": dist.get_world_size(), "backend": dist.get_backend()}
    (folder / f"rank-{rank}.json").write_text(json.dumps(facts))
    if "ddp" in cases and peft is not None:
        adapters = [
            adapter(folder),
            adapter(folder, ddp_find_unused_parameters=False),
            adapter(folder, **NON_REENTRANT),
        ]
        (folder / f"adapters-{rank}.json").write_text(json.dumps(adapters))
    if rank == 0:
        (folder / "requests").write_bytes(
            pickle.dumps([pickle.loads(each) for each in requests.values()])
        )
    sys.stdout.flush()
    os._exit(0)  # gloo now and then aborts a process at its end


if __name__ == "__main__":
    main(Path(sys.argv[1]))
