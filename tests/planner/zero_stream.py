"""What DeepSpeed's engine does, as a list: on two CPU ranks with bytes, or in the planner without.

For test_zero.py.

`zero_stream.py ranks FOLDER` is one rank of a launch, `zero_stream.py planner FOLDER` the planner's
subprocess. Both write, for each case, every collective (name, elements, dtype), every weight that
is released, and the sizes of parts.
"""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.wanted import read_wanted

AUTO = {
    "bf16": {"enabled": "auto"},
    "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
}
PINNED = {"device": "cpu", "pin_memory": True}
CASES: dict[str, dict[str, Any]] = {
    "3, checkpointing": {
        "zero": {
            "stage": 3,
            "sub_group_size": 50_000,
            "stage3_param_persistence_threshold": 2048,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": 9000,
            "overlap_comm": True,
        },
        "gradient_checkpointing": True,
        "gradient_accumulation_steps": 2,
    },
    "3, offloaded": {
        "zero": {
            "stage": 3,
            "offload_optimizer": PINNED,
            "offload_param": PINNED,
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": 60_000,
            "stage3_param_persistence_threshold": "auto",
        },
    },
    "2": {
        "zero": {
            "stage": 2,
            "reduce_bucket_size": 40_000,
            "allgather_bucket_size": 30_000,
            "overlap_comm": True,
        }
    },
    "1, offloaded": {
        "zero": {"stage": 1, "round_robin_gradients": True, "offload_optimizer": {"device": "cpu"}},
        "gradient_accumulation_steps": 3,
    },
}
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "vocab_size": 499,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
    "architectures": ["LlamaForCausalLM"],
}
LENGTH = 32
NUM_STEPS = 3
COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "reduce",
    "reduce_scatter_fn",
    "broadcast",
)


def arguments(case: dict[str, Any], folder: str) -> dict[str, Any]:
    given = {name: value for name, value in case.items() if name != "zero"}
    return {
        "output_dir": folder,
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": 1,
        "bf16": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "optim": "adamw_torch",
        "deepspeed": {**AUTO, "zero_optimization": case["zero"]},
        **given,
    }


class Recorder:
    """Stands between the engine and what it calls."""

    def __init__(self) -> None:
        import torch
        from deepspeed import DeepSpeedEngine, comm
        from deepspeed.accelerator import get_accelerator
        from deepspeed.runtime.zero import partition_parameters

        self.stream: list[Any] = []
        self.engines: list[Any] = []
        self.held: list[int] = []
        self.pinned: list[int] = []
        for name in COLLECTIVES:
            setattr(comm, name, self.noting(name, getattr(comm, name), torch))
        free, make, step = (
            partition_parameters.free_param,
            DeepSpeedEngine.__init__,
            DeepSpeedEngine.step,
        )

        def freed(param: Any) -> None:
            self.stream.append(["release", param.ds_numel])
            free(param)

        def made(engine: Any, *args: Any, **kwargs: Any) -> None:
            make(engine, *args, **kwargs)
            self.engines.append(engine)
            self.held.append(held())
            self.stream.append(["begin"])

        def stepped(engine: Any, *args: Any, **kwargs: Any) -> None:
            step(engine, *args, **kwargs)
            if engine.global_steps == NUM_STEPS:
                self.held.append(held())

        partition_parameters.free_param = freed
        DeepSpeedEngine.__init__, DeepSpeedEngine.step = made, stepped
        kind = type(get_accelerator())
        pin = kind.pin_memory

        def pinned(accelerator: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self.pinned.append(tensor.nbytes)
            return pin(accelerator, tensor, *args, **kwargs)

        kind.pin_memory = pinned

    def noting(self, name: str, original: Any, torch: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
            self.stream.append(
                [
                    name,
                    *(each.numel() for each in tensors),
                    str(tensors[0].dtype) if tensors else "",
                ]
            )
            return original(*args, **kwargs)

        return noted

    def begin(self) -> None:
        self.stream, self.held, self.pinned = [], [held()], []

    def take(self) -> dict[str, Any]:
        engine = self.engines.pop()
        nothing, *made = self.held
        return {
            "stream": self.stream,
            "held": [each - nothing for each in made],
            "parts": parts(engine),
            "world_size": engine.world_size,
            "num_steps": engine.global_steps,
            "pinned": self.pinned,
        }


def held() -> int:
    """Bytes of all tensors of numbers with a point that Python holds, on the card and off it."""
    import gc

    import torch

    for _ in range(5):  # what a collection frees may be the last to hold other garbage
        if not gc.collect():
            break
    tensors = [
        each
        for each in gc.get_objects()
        if isinstance(each, torch.Tensor) and each.is_floating_point()
    ]
    storages = {
        each.untyped_storage()._cdata: each.untyped_storage().nbytes()
        for each in tensors
        if not each.is_meta
    }
    return sum(storages.values())


def parts(engine: Any) -> dict[str, Any]:
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        weights = [*engine.module.parameters()]
        return {
            "partitions": [weight.ds_tensor.numel() for weight in weights],
            "persistent": [weight.ds_numel for weight in weights if weight.ds_persist],
            "sub-groups": [*map(int, optimizer.fp16_partitioned_groups_flat_numel)],
            "masters": [each.numel() for each in optimizer.fp32_partitioned_groups_flat],
            "gradients": optimizer.grad_partitions_flat_buffer.numel(),
            "buckets": [bucket.buffer.numel() for bucket in optimizer.ipg_buckets.values()],
            "states": states(optimizer),
        }
    return {
        "weights": [each.numel() for each in optimizer.bit16_groups_flat],
        "partitions": [*map(int, optimizer.partition_size)],
        "padding": [*map(int, optimizer.groups_padding)],
        "masters": [each.numel() for each in optimizer.single_partition_of_fp32_groups],
        "states": states(optimizer),
    }


def states(optimizer: Any) -> list[int]:
    sizes: dict[str, int] = defaultdict(int)
    for state in optimizer.optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            sizes[name] += state[name].numel()
    return [*sizes.values()]


def with_bytes(folder: Path) -> None:
    import gc

    import deepspeed
    import torch
    from accelerate.state import AcceleratorState
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    recorder, found = Recorder(), {}
    tokens = torch.randint(1, 499, (12, LENGTH), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    for name in read_wanted(folder):
        case = CASES[name]
        AcceleratorState._reset_state(reset_partial_state=True)
        args = TrainingArguments(**arguments(case, str(folder)), use_cpu=True)
        deepspeed.init_distributed("gloo")
        recorder.begin()
        sizes = {
            key: value
            for key, value in CONFIG.items()
            if key not in ("model_type", "architectures")
        }
        model = LlamaForCausalLM._from_config(LlamaConfig(**sizes), dtype=torch.bfloat16)
        trainer = Trainer(model=model, args=args, train_dataset=rows)
        trainer.train()
        found[name] = recorder.take()
        unset_hf_deepspeed_config()
        trainer.model_wrapped.destroy()
        del trainer, model, args
        gc.collect()
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


def without_bytes(folder: Path) -> None:
    os.environ["DS_ACCELERATOR"] = "cuda"
    from dataclasses import asdict

    from trainer_plugins.planner import worker
    from trainer_plugins.planner.inputs import arguments_to_send
    from trainer_plugins.planner.request import ConfigSource, PlanRequest

    recorder, found = Recorder(), {}
    environment = dict(os.environ)
    for name in read_wanted(folder):
        case = CASES[name]
        os.environ.clear()
        os.environ.update(environment)
        source = ConfigSource(
            config=CONFIG,
            arguments=arguments_to_send(arguments(case, "runs")),
            sequence_length=LENGTH,
            dtype="bfloat16",
        )
        recorder.begin()
        plan = asdict(worker.predict(PlanRequest(source=source, num_gpus=2)))
        found[name] = {**recorder.take(), "plan": plan}
    (folder / "planner.json").write_text(json.dumps(found))


if __name__ == "__main__":
    {"ranks": with_bytes, "planner": without_bytes}[sys.argv[1]](Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(
        0
    )  # gloo now and then aborts a process at its end, and the fakes of the planner are not to be undone
