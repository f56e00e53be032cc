"""Train the model of `benchmarks/streaming.py` on the CPU: plainly, or with DeepSpeed ZeRO-3.

Usage: python -m benchmarks.streaming_deepspeed {plain,zero3} FOLDER. It writes the seconds of a
step to FOLDER/{plain,zero3}.json, once it has verified that ZeRO-3 and its offload are in force.
"""

import json
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any

from transformers import Trainer

from benchmarks.streaming import LARGE, StepClock, model_of, rows_for, settings

ZERO3 = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": False},
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 1e6,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 1e6,
    },
    "zero_force_ds_cpu_optimizer": False,
}
"""Gathers about two layers' weights at once; small ones are partitioned too."""


def main(way: str, folder: str) -> None:
    """Train, and record the step time."""
    more: dict[str, Any] = {"deepspeed": ZERO3} if way == "zero3" else {}
    args = settings(folder, use_cpu=True, **more)
    clock = StepClock()
    model: Any = model_of("Llama", 0.0, **LARGE)
    trainer = Trainer(model, args, train_dataset=rows_for("Llama"), callbacks=[clock])
    trainer.train()
    if way == "zero3":
        _prove(trainer)
    Path(folder, f"{way}.json").write_text(json.dumps({"seconds": median(clock.seconds[1:])}))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads end some processes with -6 after their work is done


def _prove(trainer: Trainer) -> None:
    """Verify that the base's weights are partitioned, offloaded, and away between two steps."""
    engine: Any = trainer.model_wrapped
    assert type(engine).__name__ == "DeepSpeedEngine", type(engine)
    assert engine.zero_optimization_stage() == 3
    assert str(engine.zero_offload_param().device).endswith("cpu")
    frozen = [one for one in engine.module.parameters() if not one.requires_grad]
    assert frozen
    for one in frozen:
        assert not one.ds_persist
        assert one.numel() == 0 < one.ds_numel, "it is gathered between two steps"
        assert one.ds_tensor.device.type == "cpu"


if __name__ == "__main__":
    main(*sys.argv[1:])
