"""What a plan proposes where a run does not fit: what an expert would."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner.test_plans import LORA, request
from trainer_plugins import checkpointing
from trainer_plugins.drycuda.predict import predict_all
from trainer_plugins.launch import configs
from trainer_plugins.planner.compare.switches import can_offload_activations
from trainer_plugins.planner.compare.ways import _launches
from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.planner.request import ConfigSource
from trainer_plugins.units import MIB

MODEL = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 8192,
}
SYNC = "sync_each_batch"


def asked(rows: int, *flags: str):
    run = request(
        MODEL, *flags, rows=rows, gpu="80GiB", num_gpus=2, dtype=None, sequence_length=2048
    )
    return replace(run, launch_file=str(configs.path("fsdp2")))


@pytest.mark.all
def test_under_fsdp2_pieces_keep_whole_gradients_unless_each_micro_batch_reduces_them() -> None:
    pieces = ("--gradient_accumulation_steps", "4", "--gradient_checkpointing", "True")
    each_time = ("--accelerator_config", f'{{"gradient_accumulation_kwargs": {{"{SYNC}": true}}}}')
    whole, divided = predict_all([asked(1, *pieces), asked(1, *pieces, *each_time)])
    assert isinstance(whole, MemoryPlan)
    assert isinstance(divided, MemoryPlan)
    half = whole.num_parameters * 4 // 2
    spared = whole.moments["backward"].allocated_bytes - divided.moments["backward"].allocated_bytes
    assert spared > 0.7 * half


@pytest.mark.all
def test_an_adapter_on_one_output_is_resumed_from_one_cards_part_of_it() -> None:
    """Where a part begins is a number that torch reads from a tensor."""
    experts = {**MODEL, "model_type": "qwen2_moe", "num_hidden_layers": 1, "num_experts": 4}
    sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    run = asked(1)
    source = run.source
    assert isinstance(source, ConfigSource)
    adapter = {"peft_type": "LORA", "r": 16, "target_modules": "all-linear"}
    source = replace(source, config={**experts, **sizes}, peft=adapter, sequence_length=64)
    (plan,) = predict_all([replace(run, source=source)])
    assert isinstance(plan, MemoryPlan), plan
    assert "resume" in plan.moments


@pytest.mark.parametrize(
    ("strategy", "files"),
    [
        ("DDP", ["fsdp2", "zero3", "zero3_offload_all"]),
        ("DeepSpeed ZeRO-2", ["zero3", "zero3_offload_all"]),
        ("DeepSpeed ZeRO-3", ["zero3_offload_all"]),
        ("FSDP2", ["fsdp2_offload"]),
    ],
)
def test_a_launch_that_divides_more_is_tried_after_the_one_that_is_given(strategy, files) -> None:
    run = asked(1)
    found = list(_launches(run, strategy))
    assert [Path(each.flags.split()[1]).stem for each in found] == files
    assert Path(found[0].turn(run).launch_file or "").stem == files[0]


@pytest.mark.parametrize(
    ("trainer", "is_offered"), [(None, True), ("sft", True), ("dpo", False), ("grpo", False)]
)
def test_activations_are_not_offloaded_where_trl_switches_checkpointing_on_again(
    trainer: str | None, is_offered: bool
) -> None:
    assert can_offload_activations(trainer) is (is_offered and checkpointing.CAN_OFFLOAD)


@pytest.mark.all
def test_beside_vllm_a_smaller_share_is_proposed_before_the_training_changes() -> None:
    flags = ("--num_generations", "4", "--max_completion_length", "40")
    vllm = ("--use_vllm", "True", "--vllm_gpu_memory_utilization", "0.9")
    asked = request(
        MODEL, *flags, *vllm, rows=4, gpu="6GiB", trainer="grpo", dtype=None, sequence_length=64
    )
    (plan,) = predict_all([replace(asked, proposes=True)])
    assert isinstance(plan, MemoryPlan)
    assert plan.fits is False
    first = plan.proposals[0]
    assert first.changes[-1].startswith("vLLM's share ")
    assert "--vllm_gpu_memory_utilization 0." in first.flags
    tried = [*plan.tried_without_success, *(str(each.changes) for each in plan.proposals)]
    assert not any("activations offloaded" in each for each in tried)


def test_weights_that_do_not_fit_are_made_smaller() -> None:
    """Fewer rows cannot help, and half the bytes of each weight do."""
    flags = ("--save_strategy", "no")
    run = request(MODEL, *flags, gpu="124MiB", dtype=None, sequence_length=64, peft=LORA)
    (plan,) = predict_all([replace(run, proposes=True)])
    assert isinstance(plan, MemoryPlan)
    assert plan.loaded_bytes is not None
    assert plan.loaded_bytes > 124 * MIB
    assert "--dtype bfloat16" in [each.flags for each in plan.proposals], plan.tried_without_success
