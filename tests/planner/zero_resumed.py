"""Resume a training under ZeRO: on two ranks with a simulated card each, or in the planner.

For test_zero_resume.py.

`zero_resumed.py ranks FOLDER` is one rank of a launch, which trains a step, saves, and resumes. It
writes what that took of its card and of main memory. `zero_resumed.py planner FOLDER` predicts it.
"""

import gc
import json
import os
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.planner.zero_stream import AUTO

IN_MEMORY = {"device": "cpu", "pin_memory": False}
BUCKETS = {"reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000}
PARTS = {"reduce_bucket_size": 500_000, "stage3_param_persistence_threshold": 1000}
OFFLOADED = {**PARTS, "offload_optimizer": IN_MEMORY, "offload_param": IN_MEMORY}
CASES: dict[str, dict[str, Any]] = {
    "1": {"stage": 1, **BUCKETS},
    "2": {"stage": 2, **BUCKETS},
    "2, offloaded": {"stage": 2, "offload_optimizer": IN_MEMORY, **BUCKETS},
    "3": {"stage": 3, **PARTS},
    "3, optimizer offloaded": {"stage": 3, **PARTS, "offload_optimizer": IN_MEMORY},
    "3, offloaded": {"stage": 3, **OFFLOADED},
    "3, offloaded, in turn": {"stage": 3, "pipeline_loading_checkpoint": True, **OFFLOADED},
}
ADAPTED: dict[str, dict[str, Any]] = {"2, LoRA": CASES["2"], "3, LoRA": CASES["3"]}
CASES |= ADAPTED
LORA = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 64, "target_modules": ["q_proj"]}
REFUSED: dict[str, dict[str, Any]] = {
    "elastic, 2": {"zero_optimization": {"stage": 2, "elastic_checkpoint": True, **BUCKETS}},
    "elastic, 3": {"zero_optimization": {"stage": 3, "elastic_checkpoint": True, **PARTS}},
    "in turn, 2": {"zero_optimization": {"stage": 2, "pipeline_loading_checkpoint": True}},
    "universal": {
        "zero_optimization": {"stage": 2, **BUCKETS},
        "checkpoint": {"load_universal": True},
    },
}
FUSED = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
PLANNED: dict[str, dict[str, Any]] = {
    **REFUSED,
    "fused": {"zero_optimization": {"stage": 2, **BUCKETS}, **FUSED},
    "elastic, fused": {**REFUSED["elastic, 2"], **FUSED},
    **{name: {"zero_optimization": zero} for name, zero in CASES.items()},
}
CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "vocab_size": 4099,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
    "architectures": ["LlamaForCausalLM"],
}
LENGTH = 16


def arguments(name: str, folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": 1,
        "per_device_train_batch_size": 1,
        "bf16": True,
        "report_to": "none",
        "save_strategy": "steps",
        "save_steps": 1,
        "disable_tqdm": True,
        "logging_strategy": "no",
        "optim": "adamw_torch",
        "dataloader_pin_memory": False,
        "deepspeed": {**AUTO, **PLANNED[name]},
    }


class Host(TorchDispatchMode):
    """Counts the tensors in main memory, with the time of each change."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.changes: list[tuple[float, int]] = []
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(each, torch.Tensor) and each.device.type == "cpu":
                self._see(each.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def died(_: object) -> None:
            del self._alive[key]
            self._add(-num_bytes)

        self._alive[key] = weakref.ref(storage, died)
        self._add(num_bytes)

    def _add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.changes.append((time.monotonic(), self.now))


def kernel_says(name: str) -> int:
    """Bytes of this process: VmRSS now, or VmHWM at the peak since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def simulated_cards() -> None:
    """Let torch and DeepSpeed find a card of their own in each rank."""
    from trainer_plugins.testing import simgpu

    simgpu.enable(capacity_bytes=1 << 30)
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class Simulated(CPU_Accelerator):
        def device_name(self, device_index: int | None = None) -> str:
            return "simgpu" if device_index is None else f"simgpu:{device_index}"

        def device(self, device_index: int | None = None) -> Any:
            return torch.device("simgpu", device_index or 0)

        def current_device(self) -> int:
            return 0

        def current_device_name(self) -> str:
            return "simgpu:0"

        def device_count(self) -> int:
            return 1

        def on_accelerator(self, tensor: torch.Tensor) -> bool:
            return tensor.device.type == "simgpu"

    set_accelerator(Simulated())


@contextmanager
def measured(told: dict[str, Any], host: Host) -> Iterator[None]:
    """Note what a load takes: of the card, of main memory in tensors, and as the kernel tells."""
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    Path("/proc/self/clear_refs").write_text("5")
    resident = kernel_says("VmRSS")
    card, in_memory = torch.accelerator.memory_allocated(), host.now
    host.changes = [(time.monotonic(), host.now)]
    yield
    peak = max(now for _, now in host.changes)
    told |= {
        "card": torch.accelerator.memory_stats()["requested_bytes.all.peak"],
        "host": peak,
        "host_changes": host.changes,
        "kernel": kernel_says("VmHWM") - resident,
        "tensors": peak - in_memory + torch.accelerator.max_memory_allocated() - card,
    }


def with_bytes(folder: Path) -> None:
    import deepspeed
    from accelerate.state import AcceleratorState
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
    from transformers import trainer as module
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    simulated_cards()
    tokens = torch.randint(1, 499, (12, LENGTH), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    sizes = {k: v for k, v in CONFIG.items() if k not in ("model_type", "architectures")}
    load = module.deepspeed_load_checkpoint

    def trained(name: str, checkpoint: str | None) -> dict[str, Any]:
        told: dict[str, Any] = {}
        gc.collect()
        AcceleratorState._reset_state(reset_partial_state=True)
        args = TrainingArguments(**arguments(name, str(folder / name)))
        deepspeed.init_distributed("gloo")
        if checkpoint is not None:
            args.max_steps, args.save_strategy = 2, "no"
        host = Host()

        def loaded(*words: Any, **more: Any) -> None:
            with measured(told, host):
                load(*words, **more)

        module.deepspeed_load_checkpoint = loaded
        with host:
            model = LlamaForCausalLM._from_config(LlamaConfig(**sizes), dtype=torch.bfloat16)
            if name in ADAPTED:
                model = get_peft_model(model, LoraConfig(**LORA))
            trainer = Trainer(model=model, args=args, train_dataset=rows)
            trainer.train(resume_from_checkpoint=checkpoint)
        engine: Any = trainer.model_wrapped
        told |= {
            "world_size": engine.world_size,
            "stage": engine.zero_optimization_stage(),
            "num_steps": engine.global_steps,
            "device": str(args.device),
        }
        unset_hf_deepspeed_config()
        engine.destroy()
        FWD_MODULE_STACK.clear()  # it would keep the weights
        return told

    found = {}
    for name in CASES:
        trained(name, None)
        found[name] = trained(name, str(folder / name / "checkpoint-1"))
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


def requested(trace: Any) -> int:
    """The peak of the resumption without workspaces, which a new process has not yet."""
    from trainer_plugins.planner.tracing.events import ALLOC, FREE

    now = peak = 0
    for kind, number, moment in trace.events:
        if kind in (ALLOC, FREE) and trace.storages[number].category != "workspaces":
            now += kind * trace.storages[number].num_bytes
        peak = max(peak, now) if moment == "resume" else peak
    return peak


def without_bytes(folder: Path) -> None:
    os.environ["DS_ACCELERATOR"] = "cuda"
    from dataclasses import asdict

    from trainer_plugins.planner import worker
    from trainer_plugins.planner.inputs import arguments_to_send
    from trainer_plugins.planner.request import ConfigSource, PlanRequest
    from trainer_plugins.planner.tracing.events import Trace
    from trainer_plugins.planner.tracing.host_tensors import HostMemory
    from trainer_plugins.planner.tracing.trace import Tracker

    HostMemory.pin = HostMemory.see  # type: ignore[method-assign]  # test_zero.py has its blocks
    watched, traces, found = Tracker.trace, [], {}

    def noted(tracker: Tracker) -> Trace:
        traces.append(watched(tracker))
        return traces[-1]

    Tracker.trace = noted  # type: ignore[method-assign,assignment]
    environment = dict(os.environ)
    for name in PLANNED:
        os.environ.clear()
        os.environ.update(environment)
        source = ConfigSource(
            config=CONFIG,
            arguments=arguments_to_send(arguments(name, "runs")),
            sequence_length=LENGTH,
            dtype="bfloat16",
            peft=LORA if name in ADAPTED else None,
        )
        plan = asdict(worker.predict(PlanRequest(source=source, num_gpus=2)))
        card = requested(traces[-1])
        found[name] = {"plan": plan, "card": card, "host": dict(traces[-1].host_peaks)}
    (folder / "planner.json").write_text(json.dumps(found))


if __name__ == "__main__":
    {"ranks": with_bytes, "planner": without_bytes}[sys.argv[1]](Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # gloo now and then aborts a process at its end
