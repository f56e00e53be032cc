"""Spell advice as LLaMA-Factory, ms-swift, axolotl and verl do in their files and commands."""

from collections.abc import Mapping

from trainer_plugins import advice
from trainer_plugins.advice import Advice
from trainer_plugins.explain.text.text_facts import TextFacts

_FRAMEWORKS = {
    "llama-factory": r"(?im)llama-?factory|^finetuning_type:",
    "swift": r"(?i)\bms-?swift\b|\bswift (?:sft|rlhf|pt|export|infer)\b|\bswift/cli/",
    "axolotl": r"(?im)\baxolotl\b|^(?:dataset_processes|sample_packing|sequence_len):",
    "verl": r"\bverl\b|actor_rollout_ref",
}
SPELLED: Mapping[tuple[Advice, str], str] = {
    (advice.SHARD_THE_RUN, "llama-factory"): "deepspeed: examples/deepspeed/ds_z3_config.json",
    (advice.SHARD_THE_RUN, "swift"): "--deepspeed zero3",
    (advice.SHARD_THE_RUN, "axolotl"): "deepspeed: deepspeed_configs/zero3_bf16.json",
    (advice.OFFLOAD_OPTIMIZER, "llama-factory"): (
        "deepspeed: examples/deepspeed/ds_z3_offload_config.json"
    ),
    (advice.OFFLOAD_OPTIMIZER, "swift"): "--deepspeed zero3_offload",
    (advice.OFFLOAD_OPTIMIZER, "axolotl"): (
        "deepspeed: deepspeed_configs/zero3_bf16_cpuoffload_all.json"
    ),
    (advice.ADAPTER, "llama-factory"): "finetuning_type: lora",
    (advice.ADAPTER, "swift"): "--train_type lora",
    (advice.ADAPTER, "axolotl"): "adapter: lora",
    (advice.FOUR_BITS, "llama-factory"): "quantization_bit: 4",
    (advice.FOUR_BITS, "swift"): "--quant_method bnb --quant_bits 4",
    (advice.FOUR_BITS, "axolotl"): "adapter: qlora, load_in_4bit: true",
    (advice.MERGE_IN_MAIN_MEMORY, "llama-factory"): "export_device: cpu",
    (advice.MERGE_IN_MAIN_MEMORY, "swift"): "--device_map cpu",
    (advice.SHORTER_ROWS, "swift"): "--truncation_strategy delete",
    (advice.STREAM_THE_DATA, "llama-factory"): "streaming: true",
    (advice.STREAM_THE_DATA, "swift"): "--streaming true",
    (advice.STREAM_THE_DATA, "axolotl"): "streaming: true   # with max_steps: STEPS",
    (advice.SAVE_ONLY_MODEL, "verl"): (
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,extra]"
    ),
    (advice.LIGER, "llama-factory"): "enable_liger_kernel: true",
    (advice.LIGER, "axolotl"): "liger_fused_linear_cross_entropy: true",
    (advice.LIGER, "verl"): "actor_rollout_ref.model.use_fused_kernels=True",
    (advice.CHECKPOINTING, "axolotl"): "gradient_checkpointing: true",
    (advice.CHECKPOINTING, "verl"): "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    (advice.FEWER_FRAMES, "llama-factory"): "video_maxlen: 16",
    (advice.FEWER_FRAMES, "swift"): "export FPS_MAX_FRAMES=16   # MiniCPM-V: MAX_NUM_FRAMES=16",
    (advice.FEWER_PATCHES, "llama-factory"): "image_max_pixels: 401408",
    (advice.FEWER_PATCHES, "swift"): "export MAX_PIXELS=401408",
}


def spell_for(one: Advice, facts: TextFacts) -> str | None:
    """Spell an advice for the framework that the text names; None if it is not known there."""
    return SPELLED.get((one, find_framework(facts)))


def find_framework(facts: TextFacts) -> str:
    """Return the framework that the text names; empty if it names none of these."""
    return next((name for name, seen in _FRAMEWORKS.items() if facts.says(seen)), "")
