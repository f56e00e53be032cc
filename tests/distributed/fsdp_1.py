"""Models under FSDP 1, as two ranks have them. accelerate takes it to accelerators only, torch to the CPU too."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel

from tests.models import tiny_llama
from trainer_plugins.launch.in_force import strategy_of

dist.init_process_group("gloo")
Accelerator(cpu=True)
cpu = torch.device("cpu")
args: Any = SimpleNamespace(world_size=2, device=cpu)
wrapped: dict[str, Any] = {
    "orig_params": FullyShardedDataParallel(tiny_llama(), device_id=cpu, use_orig_params=True),
    "flat_params": FullyShardedDataParallel(tiny_llama(), device_id=cpu, use_orig_params=False),
    "offload": FullyShardedDataParallel(
        tiny_llama(), device_id=cpu, cpu_offload=CPUOffload(offload_params=True)
    ),
}
wrapped["compiled"] = torch.compile(wrapped["flat_params"])
found = {name: asdict(strategy_of(model, None, args)) for name, model in wrapped.items()}
found["num_params"] = sum(p.numel() for p in tiny_llama().parameters())
Path(sys.argv[1], f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
sys.stdout.flush()
os._exit(0)
