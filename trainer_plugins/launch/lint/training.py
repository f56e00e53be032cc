"""Names and reads TrainingArguments, and judges whether a launch file contradicts them.

Source: trainer_config_process and _finalize of HfTrainerDeepSpeedConfig, transformers 5.23.
"""

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from trainer_plugins.checkpointing import spelled
from trainer_plugins.finding import Finding
from trainer_plugins.launch.lint.document import ConfigError, Document, part

# What people call the same, and programs use for something else too: the batch of all cards.
CALLED_ELSEWHERE = {
    "batch_size": "per-device-train-batch-size",
    "train_batch_size": "per-device-train-batch-size",
}
_FILES = ("training_args.py", "training_args_seq2seq.py")
_OF_TRL = (
    "trainer/base_config.py",
    "trainer/{0}_config.py",
    "trainer/grpo_config.py",
    "experimental/{0}/{0}_config.py",
)
_SURE = 0.85  # of 1: `gradient_checkpoint` is near enough, `lora_r` is not `local_rank`


@functools.cache
def argument_names(trainer: str | None = None) -> frozenset[str]:
    """Return the names that the installed TrainingArguments take; none if it is not found.

    With one of TRL's Trainers, as in "sft", also those of its own config.
    """
    names = _fields_in("transformers", _FILES)
    if trainer is None:
        return names
    grouped = trainer == "gmpo"  # its config is one of GRPO's
    files = [each.format(trainer) for each in _OF_TRL if grouped or "grpo" not in each]
    return names | _fields_in("trl", files)


@functools.cache
def optimizer_names() -> frozenset[str]:
    """Return what `optim` of the installed TrainingArguments takes; none if it is not found."""
    return frozenset(
        line.value.value
        for each in _classes_in("transformers", _FILES[:1])
        if each.name == "OptimizerNames"
        for line in each.body
        if isinstance(line, ast.Assign)
        and isinstance(line.value, ast.Constant)
        and isinstance(line.value.value, str)
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the name that was meant: one that means the same, or of which this is a slip.

    >>> nearest("bf61", ["bf16", "fp16"]), nearest("lora_r", ["local_rank"])
    ('bf16', '')
    """
    spelt = name.replace("-", "_")
    if spelt in CALLED_ELSEWHERE:
        return CALLED_ELSEWHERE[spelt]
    by_spelling = {each.replace("-", "_"): each for each in reversed([*known])}
    swapped = [each for each in by_spelling if sorted(each) == sorted(spelt)]
    near = swapped or get_close_matches(spelt, by_spelling, n=1, cutoff=_SURE)
    return spelled(by_spelling[near[0]]) if near else ""


def _fields_in(package: str, files: Iterable[str]) -> frozenset[str]:
    return frozenset(
        line.target.id
        for each in _classes_in(package, files)
        for line in each.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    )


def _classes_in(package: str, files: Iterable[str]) -> Iterator[ast.ClassDef]:
    """Yield the classes in files of an installed package, which is not imported."""
    found = find_spec(package)
    if found is None or found.origin is None:
        return
    for file in files:
        path = Path(found.origin).parent / file
        if path.is_file():
            body = ast.parse(path.read_text(encoding="utf-8")).body
            yield from (each for each in body if isinstance(each, ast.ClassDef))


def unknown_argument(names: Iterable[str]) -> str:
    """Say which of these is no TrainingArgument, and which was probably meant; else nothing."""
    known = argument_names()
    for name in names if known else ():
        if name not in known:
            near = nearest(name, known)
            hint = f": is it --{near}?" if near else ""
            return f"neither plan nor TrainingArguments knows --{name}{hint}"
    return ""


class _Pair(NamedTuple):
    key: str  # of DeepSpeed
    name: str  # of TrainingArguments
    default: object
    stops_most: bool = False  # whether a fixed value stops most trainings


_PAIRS = (
    _Pair("train_micro_batch_size_per_gpu", "per_device_train_batch_size", 8, stops_most=True),
    _Pair("gradient_accumulation_steps", "gradient_accumulation_steps", 1, stops_most=True),
    _Pair("gradient_clipping", "max_grad_norm", 1.0, stops_most=True),
    _Pair("bf16.enabled", "bf16", False, stops_most=True),
    _Pair("fp16.enabled", "fp16", False, stops_most=True),
    _Pair("optimizer.params.lr", "learning_rate", 5e-5),
    _Pair("optimizer.params.eps", "adam_epsilon", 1e-8),
    _Pair("optimizer.params.weight_decay", "weight_decay", 0.0),
    _Pair("scheduler.params.warmup_max_lr", "learning_rate", 5e-5),
)


def training_arguments(words: Sequence[str]) -> dict[str, object]:
    """Read TrainingArguments from a command line, or from `key=value` words.

    >>> training_arguments(["--bf16", "--max-grad-norm", "0.3", "learning_rate=2e-5"])
    {'bf16': True, 'max_grad_norm': 0.3, 'learning_rate': 2e-05}
    >>> training_arguments(["--optim_target_modules", '["mlp"]'])
    {'optim_target_modules': ['mlp']}
    """
    found: dict[str, object] = {}
    waiting: str | None = None  # the name of a flag whose value may follow
    for word in words:
        if word.startswith("--") or (waiting is None and "=" in word):
            name, equals, value = word.removeprefix("--").partition("=")
            name = spelled(name.replace("-", "_"))
            found[name] = _value(value) if equals else True
            waiting = None if equals else name
        elif waiting is not None:
            found[waiting] = _value(word)
            waiting = None
        else:
            raise ConfigError(
                f"training arguments are --name value or name=value, got {word!r} without a name"
            )
    return found


def _value(text: str) -> object:
    try:
        is_power = "e" in text.lower() and not text.startswith("{")
        return float(text) if is_power else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError, RecursionError):
        return yaml.safe_load(text) if text.lower() in ("true", "false") else text


def training_findings(
    document: Document, training: Mapping[str, object] | None
) -> Iterator[Finding]:
    """Judge a file by TrainingArguments; if they are unknown, by what most trainings have."""
    config = _handed_over(document)
    for key, name, default, stops_most in _PAIRS:
        value = part(config, key)
        if value is None or value == "auto" or isinstance(value, dict):
            continue
        is_written = part(document.deepspeed or config, key) is not None
        source = "written" if is_written else "filled in by accelerate because it is missing"
        if training is None:
            if stops_most and not (name in ("bf16", "fp16") and value is False):
                yield _fixed(key, value, name, source)
            continue
        asked = training.get(name, default)
        if name in ("bf16", "fp16"):
            asked = bool(asked) or bool(training.get(f"{name}_full_eval", False))
        if value != asked:
            says = "the file says" if is_written else "accelerate fills in"
            given = "given" if name in training else "the default"
            yield Finding.error(
                code="config-training-mismatch",
                summary=f"{key}: {says} {value}, the training arguments say {asked}",
                evidence=f"{key} is {source}, {name} is {given}; transformers stops the training:"
                " values that mismatch TrainingArguments",
                remedy=f'Write "{key}": "auto", and set it in TrainingArguments only',
            )
    batch = config.get("train_batch_size")
    if training is None and isinstance(batch, int):
        yield _fixed("train_batch_size", batch, "the effective batch", "written")
    yield from _saves(document, training or {})


def _handed_over(document: Document) -> dict[str, Any]:
    """Return the DeepSpeed config with the values that accelerate fills in."""
    if document.deepspeed is not None:
        return {"gradient_accumulation_steps": 1, **document.deepspeed}
    names = ("gradient_accumulation_steps", "gradient_clipping")
    written = {name: document.in_accelerate(f"deepspeed_config.{name}") for name in names}
    return {name: value for name, value in written.items() if value is not None}


def _fixed(key: str, value: object, name: str, source: str) -> Finding:
    return Finding.warning(
        code="config-not-auto",
        summary=f"{key} is fixed at {value}: training stops if {name} differs",
        evidence=f"the value is {source}; transformers raises at a mismatch",
        remedy=f'Write "{key}": "auto" (in a YAML without JSON: leave it out)',
    )


def _saves(document: Document, training: Mapping[str, object]) -> Iterator[Finding]:
    fsdp = document.in_accelerate("fsdp_config")
    if not isinstance(fsdp, dict) or not training.get("save_only_model"):
        return
    kind = fsdp.get("fsdp_state_dict_type", fsdp.get("state_dict_type"))
    default = ""
    if not kind and fsdp.get("fsdp_version", fsdp.get("version", 1)) == 2:
        kind = "SHARDED_STATE_DICT"
        default = "; it is the default if fsdp_state_dict_type is missing under version 2"
    if str(kind).upper() == "SHARDED_STATE_DICT":
        yield Finding.error(
            code="config-training-mismatch",
            summary="save_only_model cannot be combined with SHARDED_STATE_DICT",
            evidence=f"the Trainer raises when it starts{default}",
            remedy="Write fsdp_state_dict_type: FULL_STATE_DICT",
        )
