"""Train under FSDP1 on ranks with a simulated card each, and note what each moment took of it.

Launched by test_fsdp1.py as `fsdp1_ranks.py FOLDER CASE ...`. The first rank also writes down what
`plan_run` would send to its subprocess.
"""

import gc
import json
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

CONFIG = {"hidden_size": 320, "intermediate_size": 640, "num_hidden_layers": 3, "vocab_size": 1023}
"""Of which neither a layer nor what is around them can be divided by 3."""

BF16 = {"bf16": True}
SAVES = {**BF16, "save_strategy": "steps", "save_steps": 3}
ACCUMULATES = {**BF16, "gradient_accumulation_steps": 3}
LORA = {"lora": True}
GRAD_OP = {"FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}
FLAT = {"FSDP_USE_ORIG_PARAMS": "false"}
SHARDED = {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
OFFLOADED = {"FSDP_OFFLOAD_PARAMS": "true"}

CASES: dict[str, dict[str, Any]] = {
    "full shard": SAVES,
    "full shard, float32": {},
    "full shard, weights in bf16": {**SAVES, "half": True},
    "full shard, flat parameters": {**SAVES, **FLAT},
    "full shard, sharded files": {**SAVES, **SHARDED},
    "full shard, several micro-batches": ACCUMULATES,
    "full shard, early gathers": {**BF16, "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE"},
    "full shard, late gathers": {
        **BF16,
        "FSDP_BACKWARD_PREFETCH": "BACKWARD_POST",
        "FSDP_FORWARD_PREFETCH": "true",
    },
    "full shard, by size": {
        **BF16,
        "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
        "FSDP_MIN_NUM_PARAMS": "150000",
    },
    "full shard, checkpointing": {**BF16, "FSDP_ACTIVATION_CHECKPOINTING": "true"},
    "full shard, checkpointing by the model": {
        **BF16,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "full shard, offloaded": {**SAVES, **OFFLOADED},
    "full shard, LoRA": {**SAVES, **LORA},
    "full shard, LoRA, bf16": {**BF16, **LORA, "half": True},
    "full shard, LoRA, flat parameters": {**BF16, **LORA, **FLAT},
    "grad op": {**SAVES, **GRAD_OP},
    "grad op, flat parameters": {**BF16, **GRAD_OP, **FLAT},
    "grad op, several micro-batches": {**ACCUMULATES, **GRAD_OP},
    "grad op, LoRA": {**SAVES, **GRAD_OP, **LORA, "half": True},
    "no shard": {**SAVES, "FSDP_SHARDING_STRATEGY": "NO_SHARD"},
    "hybrid": {**SAVES, "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"},
    "hybrid, LoRA": {**BF16, **LORA, "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"},
}
LAUNCHED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "1",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_USE_ORIG_PARAMS": "true",
}
"""What `accelerate launch` exports for a file that says little."""


def launched_as(case: dict[str, Any]) -> None:
    from accelerate.state import AcceleratorState

    for name in [*os.environ]:
        if name.startswith(("FSDP_", "ACCELERATE_MIXED_PRECISION")):
            del os.environ[name]
    os.environ.update(LAUNCHED)
    os.environ.update({name: value for name, value in case.items() if name.startswith("FSDP_")})
    AcceleratorState._reset_state()


def trainer_of(case: dict[str, Any], folder: Path, **more: Any) -> Any:
    import torch
    from transformers import Trainer, TrainingArguments

    from tests.models import tiny_llama, token_rows

    launched_as(case)
    given = {name: value for name, value in case.items() if not name.startswith("FSDP_")} | more
    half, lora = given.pop("half", False), given.pop("lora", False)
    settings = {"max_steps": 3, "per_device_train_batch_size": 2, "save_strategy": "no", **given}
    quiet = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no"}
    args = TrainingArguments(
        output_dir=str(folder), dataloader_pin_memory=False, **quiet, **settings
    )
    model: Any = tiny_llama(**CONFIG)
    if half:
        model.to(torch.bfloat16)
    if lora:
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapter)
    return Trainer(model=model, args=args, train_dataset=token_rows())


class Peaks:
    """Keeps the peak of the card in each moment of a run."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}

    def around(self, owner: Any, name: str, moment: str) -> None:
        """Measure each call of a method by itself."""
        original: Callable[..., Any] = getattr(owner, name)

        def measured(*args: Any, **kwargs: Any) -> Any:
            self.note("train")
            result = original(*args, **kwargs)
            self.note(moment)
            return result

        setattr(owner, name, measured)

    def note(self, moment: str) -> None:
        import torch

        peak = torch.accelerator.max_memory_allocated()
        self.bytes[moment] = max(self.bytes.get(moment, 0), peak)
        torch.accelerator.reset_peak_memory_stats()


def emptied_card() -> None:
    """Free what earlier runs left on the card: autograd's hooks keep flat parameters in circles."""
    import torch

    gc.collect()
    for each in gc.get_objects():
        with suppress(ReferenceError, RuntimeError):
            if isinstance(each, torch.Tensor) and each.device.type == "simgpu":
                each.untyped_storage().resize_(0)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.memory_allocated() == 0


def trained(case: dict[str, Any], folder: Path, checkpoint: str | None) -> dict[str, Any]:
    import torch

    peaks = Peaks()
    emptied_card()
    more = {"max_steps": 4, "save_strategy": "no"} if checkpoint is not None else {}
    trainer = trainer_of(case, folder, **more)
    peaks.around(trainer.accelerator, "prepare_model", "load")
    peaks.around(trainer, "_save_checkpoint", "save")
    peaks.around(trainer, "_load_from_checkpoint", "resume")
    peaks.around(trainer, "_load_optimizer_and_scheduler", "resume")
    trainer.train(resume_from_checkpoint=checkpoint)
    peaks.note("train")
    plugin = trainer.accelerator.state.fsdp_plugin
    return {
        **peaks.bytes,
        "reserved": torch.accelerator.memory_reserved(),
        "wrapped": type(trainer.model).__name__,
        "strategy": plugin.sharding_strategy.name,
        "world_size": torch.distributed.get_world_size(),
        "device": str(trainer.args.device),
        "num_steps": trainer.state.global_step,
    }


def main(folder: Path, names: list[str]) -> None:
    from trainer_plugins.testing import simgpu

    simgpu.enable(capacity_bytes=2 << 30)
    from trainer_plugins.planner.rehearse.gather import request_of

    facts, requests = {}, {}
    for name in names:
        case = CASES[name]
        runs = folder / name.replace(", ", "-").replace(" ", "-")
        requests[name] = request_of(trainer_of(case, runs), None, "", None, None)
        facts[name] = trained(case, runs, None)
        if "save_steps" in case:
            resumed = trained(case, runs, str(runs / "checkpoint-3"))
            facts[name] |= {"resume": resumed["resume"], "num_steps": resumed["num_steps"]}
    rank = os.environ["RANK"]
    if rank == "0":
        (folder / "requests").write_bytes(pickle.dumps(requests))
    (folder / f"rank-{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # gloo now and then aborts a process at its end
