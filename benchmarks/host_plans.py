"""Plan the main memory of shipped launch files: makes tests/launch/host_memory.toml, by hand.

`host_plans.py CONFIG FILE RANKS` prints one plan of it: the config of a model in tests/planner, the
name of a launch file, and the ranks. A plan of 70B takes minutes.
"""

import json
import sys
from pathlib import Path

from trainer_plugins.drycuda.predict import predict_one
from trainer_plugins.launch.configs import path
from trainer_plugins.planner.request import ConfigSource, PlanRequest

FLAGS = (
    "--output_dir runs --per_device_train_batch_size 1 --bf16 True --gradient_checkpointing True"
    " --save_strategy no"
)


def planned(config: str, file: str, num_ranks: int) -> tuple[int, int]:
    """Return the tensors in main memory and the pinned ones among them, in bytes."""
    content = json.loads(
        (Path(__file__).parents[1] / "tests" / "planner" / "configs" / f"{config}.json").read_text()
    )
    source = ConfigSource(
        config=content, arguments=tuple(FLAGS.split()), sequence_length=16, dtype="bfloat16"
    )
    plan = predict_one(PlanRequest(source=source, num_gpus=num_ranks, launch_file=str(path(file))))
    return plan.host_ram_bytes_per_node, plan.host_pinned_bytes_per_node


if __name__ == "__main__":
    print(*planned(sys.argv[1], sys.argv[2], int(sys.argv[3])))
