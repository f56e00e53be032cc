"""Remedies whose arithmetic fits: what shrinks weights, gradients and optimizer states enough."""

from collections.abc import Callable, Iterator, Mapping

from trainer_plugins import advice
from trainer_plugins.advice import Advice
from trainer_plugins.explain.answer import Remedy
from trainer_plugins.explain.shared import remedy
from trainer_plugins.explain.text.states import FOUR_BIT_BYTES, ROOM, States
from trainer_plugins.explain.text.text_facts import TextFacts
from trainer_plugins.units import size

# The others depend on a place in the traceback, which such a text has not.
_CONDITIONAL = (advice.FOUR_BITS,)
_NUM_BYTES_OFFLOADED = 4  # of a parameter on the card: its weight and its gradient

# How files and commands of others spell it.
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
    named = next((name for name, seen in _FRAMEWORKS.items() if facts.says(seen)), "")
    return SPELLED.get((one, named))


def shrink_states(
    states: States, facts: TextFacts, applies: Callable[[Advice], bool]
) -> Iterator[Remedy]:
    """Yield what makes the states fit, the cheapest to do first."""
    if not states.billions:
        without = (advice.SHARD_THE_RUN,) * states.could_be_sharded + (advice.ADAPTER,)
        yield from (remedy(one, spell_for(one, facts)) for one in without)
        return
    now = states.count_bytes()
    fits = ROOM * (states.card_bytes or 0)
    for one, num_bytes in _count_with(states):
        if num_bytes >= min(now, fits) or (one in _CONDITIONAL and not applies(one)):
            continue
        effect = f"{size(num_bytes)} instead of {size(now)} a card: {one.effect}"
        yield remedy(one, spell_for(one, facts), effect, by_arithmetic=True)


def _count_with(states: States) -> Iterator[tuple[Advice, int]]:
    if states.num_ranks > 1 and states.stage < 3:
        yield advice.SHARD_THE_RUN, states.count_bytes(stage=3)
    if not states.is_full:
        if states.weight_bytes > 1:
            yield advice.FOUR_BITS, states._replace(weight_bytes=FOUR_BIT_BYTES).count_bytes()
        return
    if not states.stage:
        yield advice.EIGHT_BIT_ADAMW, states.count_bytes(moments=2)
    left = states.billions * 1e9 * _NUM_BYTES_OFFLOADED / states.num_ranks
    yield advice.OFFLOAD_OPTIMIZER, int(left)
    adapted = states._replace(is_full=False)
    yield advice.ADAPTER, adapted.count_bytes()
    yield advice.FOUR_BITS, adapted._replace(weight_bytes=FOUR_BIT_BYTES).count_bytes()
