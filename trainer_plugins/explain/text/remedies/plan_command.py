"""plan_command: the `trainer-plugins plan` of a run, filled with what a text shows of it."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from trainer_plugins import checkpointing
from trainer_plugins.explain.text.command import find_command
from trainer_plugins.explain.text.text_facts import TextFacts
from trainer_plugins.printable import printable
from trainer_plugins.units import GIB

# The TrainingArguments that decide about memory; others need data or accounts.
DECIDING = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
    "eval_accumulation_steps", checkpointing.NAME, checkpointing.OPTIONS, "optim",
    "optim_args", "optim_target_modules", "bf16", "fp16", "bf16_full_eval", "fp16_full_eval",
    "use_liger_kernel", "torch_compile", "max_grad_norm", "label_smoothing_factor", "deepspeed",
    "fsdp", "fsdp_config", "eval_strategy", "do_eval", "prediction_loss_only",
    "batch_eval_metrics", "predict_with_generate", "generation_max_length",
    "generation_num_beams", "save_strategy", "save_only_model", "neftune_noise_alpha",
)  # fmt: skip

# What transformers' examples, TRL, LLaMA-Factory, axolotl, DeepSpeed and QLoRA call a thing.
_MODEL = "model_name_or_path|pretrained_model_name_or_path|base_model|model_name|model_id|model"
_LENGTH = (
    "max_seq_length|max_length|cutoff_len|sequence_len|model_max_length|max_seq_len|block_size"
)
_ROWS = "per_device_train_batch_size|micro_batch_size|train_micro_batch_size_per_gpu"
_RANKS = "nproc_per_node|num_processes|num_gpus"
_BITS = "bits|quantization_bit"
_DOUBLE = "bnb_4bit_use_double_quant|double_quant|double_quantization|use_nested_quant"
_DTYPES = "bfloat16|float16|float32"
# Elsewhere than in a command line the names of the other arguments mean many things.
_PLAIN = {"gradient_accumulation_steps", checkpointing.NAME, "bf16", "fp16", "optim"}
_TRAINER = re.compile(r"trl[/\\]\S*?\b(sft|dpo|kto|reward|grpo|rloo|orpo|cpo)_trainer")
_LOADED_AS = re.compile(
    r"(?:from_pretrained\(|model_init_kwargs)[^)}]{0,300}?\bdtype[\"']?\s{0,2}[=:]\s{0,2}[\"']?"
    rf"(?:torch\.)?({_DTYPES})\b"
    rf"|[\"']dtype[\"']: [\"'](?:torch\.)?({_DTYPES})[\"']"
    r"|(?i:(?:model|weights|param\w*)\b[^\n=]{0,24}?\b(?:dtype|in)\b[: =]{1,3}"
    rf"(?:torch\.)?({_DTYPES})\b)"
)
_LEFT_OPEN = ("MODEL", "LENGTH", "RANK", "ROWS")


class _Settings:  # looks in the command line that a text shows, then anywhere in the text
    def __init__(self, facts: TextFacts) -> None:
        self.text = checkpointing.spell(facts.whole)
        self.given = _arguments(find_command(self.text))

    def value(self, names: str, values: str) -> str:
        """Return what one of several names is set to; empty if to nothing of this form."""
        for name in names.split("|"):
            if re.fullmatch(values, self.given.get(name, "")):
                return self.given[name]
        is_set = rf"(?:--(?:{names})[ =]|(?<![\w.])(?:{names})[\"']? {{0,2}}[=:] {{0,2}})[\"']?"
        found = re.search(rf"{is_set}(?:torch\.)?({values})(?![\w.])", self.text)
        return found[1] if found else ""

    def is_on(self, names: str) -> bool:
        return bool(self.value(names, "[Tt]rue|1"))

    @property
    def model(self) -> str:
        given = [self.given[name] for name in _MODEL.split("|") if name in self.given]
        path = r"[\w.~-]*/[\w./-]*\w"
        loaded = re.search(rf"from_pretrained\(\s*[\"']({path})[\"']", self.text)
        return given[0] if given else loaded[1] if loaded else self.value(_MODEL, path)

    @property
    def dtype(self) -> str:
        """Return that of the weights: a dtype alone is that of any tensor in a line of code."""
        if found := self.value("torch_dtype", _DTYPES) or self.given.get("dtype", ""):
            return found
        loaded = _LOADED_AS.search(self.text)
        return next(filter(None, loaded.groups()), "").lower() if loaded else ""


def plan_command(facts: TextFacts) -> tuple[str, list[str]]:
    """Write the command, and list what is to be filled in, because the text does not show it."""
    words = ["trainer-plugins", "plan", *_words(facts, _Settings(facts))]
    return printable(shlex.join(words)), [word for word in words if word in _LEFT_OPEN]


def _words(facts: TextFacts, read: _Settings) -> Iterator[str]:
    yield from ("--model", read.model or "MODEL")
    if facts.total_bytes:
        yield from ("--gpu", f"{facts.total_bytes / GIB:.2f}GiB")
    if (ranks := read.value(_RANKS, r"\d{1,4}")) not in ("", "0", "1"):
        yield from ("--num-gpus", ranks)
    if "config_file" in read.given:
        yield from ("--accelerate-config", read.given["config_file"])
    trainers = (_TRAINER.search(frame.file) for frame in facts.frames)
    if trainer := next(filter(None, trainers), None):
        yield from ("--trainer", trainer[1])
    yield from ("--seq-length", read.value(_LENGTH, r"\d{1,7}") or "LENGTH")
    if dtype := read.dtype:
        yield from ("--dtype", dtype)
    yield from _adapter(facts, read)
    rows = read.value(_ROWS, r"\d{1,6}") or str(facts.rows("per_device_train_batch_size") or "ROWS")
    yield from ("--per_device_train_batch_size", rows)
    precision = read.value("mixed_precision", "bf16|fp16")  # what accelerate computes in
    for name in DECIDING:
        value = read.value(name, r"[\w.]+") if name in _PLAIN else read.given.get(name)
        if name in ("bf16", "fp16") and (value == "auto" or precision == name):
            value = "True"
        if value and name not in _ROWS:
            yield from (f"--{name}", value)


def _adapter(facts: TextFacts, read: _Settings) -> Iterator[str]:
    bits = read.value(_BITS, "[48]")
    is_called = facts.find_call("matmul_4bit|MatMul4Bit|Linear4bit")
    if bits == "4" or is_called or read.is_on("load_in_4bit|use_4bit"):
        yield "--load-in-4bit"
        if kind := read.value("bnb_4bit_quant_type|quant_type", "nf4|fp4"):
            yield from ("--bnb-4bit-quant-type", kind)
        if dtype := read.value("bnb_4bit_compute_dtype", _DTYPES):
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
        yield from ("--lora-r", rank or "RANK")


def _arguments(words: Sequence[str]) -> Mapping[str, str]:
    """Read the flags of a command line, and overrides as Hydra takes them.

    >>> _arguments(["x.py", "--max-length", "8", "--bf16", "--optim=sgd", "args.lr=1"])
    {'max_length': '8', 'bf16': 'True', 'optim': 'sgd', 'lr': '1'}
    """
    found: dict[str, str] = {}
    for word, after in zip(words, [*words[1:], "--"], strict=False):
        if assigned := re.fullmatch(r"(?:--|\++)?([\w.-]+)=(.*)", word):
            found[_name(assigned[1])] = assigned[2]
        elif word.startswith("--"):
            found[_name(word[2:])] = "True" if after.startswith("--") else after
    return found


def _name(text: str) -> str:
    return text.replace("-", "_").rpartition(".")[2]
