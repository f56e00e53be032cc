"""Plan Llama-3-8B on eight cards with each shipped launch file, next to DeepSpeed's estimators.

Neither has been compared with a GPU. DeepSpeed's functions (runtime/zero/stage3.py and
stage_1_and_2.py, `estimate_zero*_model_states_mem_needs`) count the states of a model, which are a
part of a plan.
"""

import json
from pathlib import Path
from typing import Any

from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

from benchmarks.prediction import columns
from trainer_plugins.drycuda.predict import predict_all
from trainer_plugins.launch.configs import path
from trainer_plugins.planner.plan import Category, MemoryPlan
from trainer_plugins.planner.request import ConfigSource, PlanRequest
from trainer_plugins.units import GIB

CONFIG = Path(__file__).parent.parent / "tests/planner/configs/llama-3-8b.json"
FLAGS = (
    "--output_dir runs --per_device_train_batch_size 1 --bf16 True --gradient_checkpointing True"
    " --save_strategy no"
)
NUM_GPUS = 8
LARGEST_LAYER = 128256 * 4096
STATES: tuple[Category, ...] = (
    "weights",
    "gradients",
    "optimizer states",
    "sharding buffers",
    "frozen weights",
)

FILES: dict[str, Any] = {
    "ddp": None,
    "fsdp2": None,
    "fsdp2_offload": None,
    "zero2": lambda total: estimate_zero2_model_states_mem_needs(
        total, NUM_GPUS, cpu_offload=False
    ),
    "zero3": lambda total: zero3(total, cpu_offload=False, cpu_offload_params=False),
    "zero3_offload_optimizer": lambda total: zero3(
        total, cpu_offload=True, cpu_offload_params=False
    ),
    "zero3_offload_all": lambda total: zero3(total, cpu_offload=True, cpu_offload_params=True),
}


def zero3(total: int, **offload: bool) -> tuple[int, int]:
    """Return DeepSpeed's estimate for stage 3: bytes on the host, and on a card."""
    on_host, on_card, _ = estimate_zero3_model_states_mem_needs(
        total, LARGEST_LAYER, NUM_GPUS, **offload
    )
    return on_host, on_card


def main() -> None:
    """Plan with all launch files, and print the table."""
    source = ConfigSource(
        config=json.loads(CONFIG.read_text()), arguments=tuple(FLAGS.split()), sequence_length=2048
    )
    plans = predict_all(
        [
            PlanRequest(source=source, num_gpus=NUM_GPUS, launch_file=str(path(name)))
            for name in FILES
        ]
    )
    print(
        "Of one GPU in GiB, and of the node's main memory for tensors; 1 row of 2048 tokens, bf16,"
        " checkpointing"
    )
    head = (
        "launch file",
        "peak",
        "states and buffers",
        "[DeepSpeed]",
        "main memory",
        "[DeepSpeed]",
    )
    lines = []
    for (name, estimate), plan in zip(FILES.items(), plans, strict=True):
        assert isinstance(plan, MemoryPlan), plan
        states = sum(plan.breakdown.get(category, 0) for category in STATES)
        host, card = estimate(plan.num_parameters) if estimate is not None else (None, None)
        cells = (plan.allocated_peak_bytes, states, card, plan.host_ram_bytes_per_node, host)
        lines.append([name, *("-" if cell is None else f"{cell / GIB:.1f}" for cell in cells)])
    columns(head, lines)


if __name__ == "__main__":
    main()
