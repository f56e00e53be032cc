"""List the options of `trainer-plugins plan` for a run, filled in from a text."""

import re
from collections.abc import Iterator

from trainer_plugins import checkpointing
from trainer_plugins.explain.text.frameworks import find_framework
from trainer_plugins.explain.text.settings import DTYPES, ROWS
from trainer_plugins.explain.text.states import read_states
from trainer_plugins.explain.text.text_facts import TextFacts
from trainer_plugins.units import GIB

# The TrainingArguments that affect memory; others need data or accounts.
DECIDING = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
    "eval_accumulation_steps", checkpointing.NAME, checkpointing.OPTIONS, "optim",
    "optim_args", "optim_target_modules", "bf16", "fp16", "bf16_full_eval", "fp16_full_eval",
    "use_liger_kernel", "torch_compile", "max_grad_norm", "label_smoothing_factor", "deepspeed",
    "fsdp", "fsdp_config", "eval_strategy", "do_eval", "prediction_loss_only",
    "batch_eval_metrics", "predict_with_generate", "generation_max_length",
    "generation_num_beams", "save_strategy", "save_only_model", "neftune_noise_alpha",
)  # fmt: skip

_RANKS = "nproc_per_node|num_processes|num_gpus"
_BITS = "bits|quantization_bit"
_DOUBLE = "bnb_4bit_use_double_quant|double_quant|double_quantization|use_nested_quant"
# Outside a command line the names of the other arguments mean many things.
_PLAIN = {"gradient_accumulation_steps", checkpointing.NAME, "bf16", "fp16", "optim"}
_TRAINER = re.compile(r"trl[/\\]\S*?\b(sft|dpo|kto|reward|grpo|rloo|orpo|cpo)_trainer")
RANK = "RANK"
LEFT_OPEN = ("MODEL", "LENGTH", RANK, "ROWS")
# Launches whose files the text has not, and programs with defaults of their own.
_ANOTHER_RUN = r"(?i)deepspeed|\bzero[-_ ]?[123]|fsdp|megatron|unsloth"


def shows_run(facts: TextFacts) -> bool:
    """Return whether a plan of what the text shows is the plan of its run."""
    words = {*list_options(facts)}
    states = read_states(facts)
    is_full = states is not None and states.is_full and not states.is_assumed
    is_known = words & {*LEFT_OPEN} <= {RANK} and "--gpu" in words
    is_usual = not find_framework(facts) and not facts.says(_ANOTHER_RUN)
    return is_known and is_usual and (is_full or "--lora-r" in words)


def list_options(facts: TextFacts) -> Iterator[str]:
    """Yield the options; `LEFT_OPEN` has the blanks that a text may not fill."""
    read = facts.settings
    yield from ("--model", read.model or "MODEL")
    states = read_states(facts)
    if card_bytes := facts.total_bytes or (states and states.card_bytes):
        yield from ("--gpu", f"{card_bytes / GIB:.2f}GiB")
    counted = str(states.num_ranks) if states else ""
    if (ranks := read.value(_RANKS, r"\d{1,4}") or counted) not in ("", "0", "1"):
        yield from ("--num-gpus", ranks)
    if "config_file" in read.given:
        yield from ("--accelerate-config", read.given["config_file"])
    trainers = (_TRAINER.search(frame.file) for frame in facts.frames)
    if trainer := next(filter(None, trainers), None):
        yield from ("--trainer", trainer[1])
    yield from ("--seq-length", str(read.length or "LENGTH"))
    if dtype := read.dtype:
        yield from ("--dtype", dtype)
    yield from _adapter(facts)
    yield from ("--per_device_train_batch_size", str(read.rows or "ROWS"))
    precision = read.value("mixed_precision", "bf16|fp16")  # accelerate's computation dtype
    for name in DECIDING:
        value = read.value(name, r"[\w.]+") if name in _PLAIN else read.given.get(name)
        if name in ("bf16", "fp16") and (value == "auto" or precision == name):
            value = "True"
        if value and name not in ROWS:
            yield from (f"--{name}", value)


def _adapter(facts: TextFacts) -> Iterator[str]:
    read = facts.settings
    bits = read.value(_BITS, "[48]")
    is_called = facts.find_call("matmul_4bit|MatMul4Bit|Linear4bit")
    if bits == "4" or is_called or read.is_on("load_in_4bit|use_4bit"):
        yield "--load-in-4bit"
        if kind := read.value("bnb_4bit_quant_type|quant_type", "nf4|fp4"):
            yield from ("--bnb-4bit-quant-type", kind)
        if dtype := read.value("bnb_4bit_compute_dtype", DTYPES):
            yield from ("--bnb-4bit-compute-dtype", dtype)
        if read.is_on(_DOUBLE):
            yield "--bnb-4bit-use-double-quant"
    elif bits == "8" or read.is_on("load_in_8bit"):
        yield "--load-in-8bit"
    rank = read.value("lora_r|lora_rank", r"\d{1,4}")
    in_python = re.search(r"LoraConfig\([^)]{0,300}?\br=(\d{1,4})", read.text)
    if not rank and in_python:
        rank = in_python[1]
    if rank or read.is_on("use_peft|use_lora") or facts.find_call(r"\bpeft[/\\]"):
        yield from ("--lora-r", rank or RANK)
