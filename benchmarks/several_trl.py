"""Repeats the long sequences of trl#6846: SFTTrainer, FSDP2, and a row shared by eight H100.

examples/sft_qwen3_8b_1m_context of huggingface/trl has the settings. The planner itself plans them.
"""

import tempfile
from pathlib import Path

from benchmarks.judge import dry_plan_of
from benchmarks.published import Row
from trainer_plugins.planner.cards import card_of
from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.planner.request import ConfigSource, PlanRequest
from trainer_plugins.planner.worker import predict

LAUNCH = """
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
parallelism_config:
  parallelism_config_cp_size: 8
"""
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000,
    "factor": 32.0,
    "original_max_position_embeddings": 32768,
}


def plan_of(row: Row, on_card: bool) -> MemoryPlan:
    """Plan a row, on fake tensors or on the dry card.

    Its name says whether what checkpointing keeps is in main memory.
    """
    length = row.settings["seq_length"]
    flags = {
        "output_dir": "runs",
        "max_length": length,
        "per_device_train_batch_size": row.settings["batch"],
        "pad_to_multiple_of": 16,
        "bf16": True,
        "save_strategy": "no",
    }
    if row.name.endswith("offload"):
        flags["gradient_checkpointing_kwargs"] = '{"offload": true}'
    source = ConfigSource(
        config={**row.architecture, "rope_parameters": ROPE},
        arguments=tuple(word for name in flags for word in (f"--{name}", str(flags[name]))),
        sequence_length=length,
        dtype="bfloat16",
        trainer="sft",
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "context_parallel_8gpu.yaml"
        file.write_text(LAUNCH)
        card = card_of("h100-80gb")
        request = PlanRequest(
            source=source, card=card, num_gpus=0, launch_file=str(file), has_padding=False
        )
        return dry_plan_of(request, Path(folder) / "request")[0] if on_card else predict(request)
