"""Judges whether a launch file and TrainingArguments agree: what stops a training, and which wins.

Sources: HfTrainerDeepSpeedConfig, deepspeed_optim_sched, and the checks of Trainer's
create_accelerator_and_postprocess, transformers 5.23.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from trainer_plugins import checkpointing
from trainer_plugins.finding import Finding
from trainer_plugins.launch.lint.document import Document, part

_Asked = Callable[["_Training"], object]  # what TrainingArguments ask for; None if it is unknown


class _Training(NamedTuple):
    values: Mapping[str, object]
    num_ranks: int | None

    def value(self, name: str, default: object) -> Any:
        found = self.values.get(name)
        return default if found is None else found

    def number(self, name: str, default: float) -> float:
        found = self.value(name, default)
        return found if isinstance(found, (int, float)) else default

    @property
    def rows_of_a_rank(self) -> float:
        rows = self.number("per_device_train_batch_size", 8)
        return rows * self.number("gradient_accumulation_steps", 1)

    @property
    def num_steps(self) -> float | None:
        steps = self.number("max_steps", -1)
        return steps if steps > 0 else None


class _Pair(NamedTuple):
    names: str  # of TrainingArguments
    asked: _Asked
    stops_most: bool = False  # whether a fixed value stops most trainings


def _plain(name: str, default: object, stops_most: bool = False) -> _Pair:
    return _Pair(name, lambda training: training.value(name, default), stops_most)


def _precision(name: str) -> _Pair:
    full = f"{name}_full_eval"

    def asked(training: _Training) -> bool:
        return bool(training.value(name, False)) or bool(training.value(full, False))

    return _Pair(f"{name}|{full}", asked, stops_most=True)


def _betas(training: _Training) -> list[object]:
    return [training.value("adam_beta1", 0.9), training.value("adam_beta2", 0.999)]


def _rows_of_all(training: _Training) -> float | None:
    return None if training.num_ranks is None else training.num_ranks * training.rows_of_a_rank


def _warmup(training: _Training) -> float | None:
    steps = training.number("warmup_steps", 0) or training.number("warmup_ratio", 0)
    if 0 < steps < 1:
        steps = -1 if training.num_steps is None else math.ceil(steps * training.num_steps)
    return max(1, int(steps)) if steps >= 0 else None


# Every key that HfTrainerDeepSpeedConfig compares: tests/launch/test_lint.py reads its code.
PAIRS = {
    "train_micro_batch_size_per_gpu": _plain("per_device_train_batch_size", 8, stops_most=True),
    "gradient_accumulation_steps": _plain("gradient_accumulation_steps", 1, stops_most=True),
    "train_batch_size": _Pair(
        "processes x per_device_train_batch_size x gradient_accumulation_steps",
        _rows_of_all,
        stops_most=True,
    ),
    "gradient_clipping": _plain("max_grad_norm", 1.0, stops_most=True),
    "bf16.enabled": _precision("bf16"),
    "fp16.enabled": _precision("fp16"),
    "optimizer.params.lr": _plain("learning_rate", 5e-5),
    "optimizer.params.betas": _Pair("adam_beta1+adam_beta2", _betas),
    "optimizer.params.eps": _plain("adam_epsilon", 1e-8),
    "optimizer.params.weight_decay": _plain("weight_decay", 0.0),
    "scheduler.params.warmup_max_lr": _plain("learning_rate", 5e-5),
    "scheduler.params.total_num_steps": _Pair("max_steps", lambda training: training.num_steps),
    "scheduler.params.warmup_num_steps": _Pair("warmup_steps", _warmup),
}


def agreement_findings(
    document: Document, values: Mapping[str, object] | None, num_ranks: int | None = None
) -> Iterator[Finding]:
    """Judge a file by TrainingArguments; if they are unknown, by what most trainings have."""
    in_file = document.in_accelerate("num_processes")
    if num_ranks is None and isinstance(in_file, int) and in_file > 0:
        num_ranks = in_file
    training = None if values is None else _Training(values, num_ranks)
    config = _handed_over(document)
    for key, pair in PAIRS.items():
        value = part(config, key)
        if value is None or value == "auto" or isinstance(value, dict):
            continue
        is_written = part(document.deepspeed or config, key) is not None
        source = "written" if is_written else "filled in by accelerate because it is missing"
        if training is not None:
            yield from _compared(key, value, pair, training, source)
        elif pair.stops_most and not (key in ("bf16.enabled", "fp16.enabled") and value is False):
            yield _fixed(key, value, f"{pair.names} differs", source)
    if training is not None:
        yield from _refused_together(document, training)
        yield from _replaced(document, training)


def _handed_over(document: Document) -> dict[str, Any]:
    """Return the DeepSpeed config with the values that accelerate fills in."""
    if document.deepspeed is not None:
        return {"gradient_accumulation_steps": 1, **document.deepspeed}
    names = ("gradient_accumulation_steps", "gradient_clipping")
    written = {name: document.in_accelerate(f"deepspeed_config.{name}") for name in names}
    return {name: value for name, value in written.items() if value is not None}


def _compared(
    key: str, value: object, pair: _Pair, training: _Training, source: str
) -> Iterator[Finding]:
    asked, rows = pair.asked(training), training.rows_of_a_rank
    if asked is None and key == "train_batch_size" and isinstance(value, (int, float)) and rows > 0:
        if value % rows == 0:
            yield _fixed(key, value, f"there are not {value / rows:.0f} processes", source)
            return
        asked = f"a multiple of {rows:g}"
    elif asked is None:
        yield _fixed(key, value, "the training has other steps", source)
        return
    if value != asked:
        says = "the file says" if source == "written" else "accelerate fills in"
        names = pair.names.replace("|", " or ").replace("+", " and ")
        yield _mismatch(
            f"{key}: {says} {value}, the training arguments say {asked}",
            f"{key} is {source}, and compared with {names}; transformers stops the training:"
            " values that mismatch TrainingArguments",
            f'Write "{key}": "auto", and set it in TrainingArguments only',
        )


def _refused_together(document: Document, training: _Training) -> Iterator[Finding]:
    """Judge what the Trainer refuses when it starts."""
    given = training.values
    is_deepspeed = document.zero_stage is not None
    is_fsdp = document.in_accelerate("distributed_type") == "FSDP"
    wrapper = "FSDP" if is_fsdp else "DeepSpeed"
    raises = "the Trainer raises when it starts"
    only_model = bool(given.get("save_only_model"))
    if only_model and given.get("load_best_model_at_end") and (is_fsdp or is_deepspeed):
        yield _mismatch(
            f"save_only_model cannot be combined with load_best_model_at_end under {wrapper}",
            raises,
            "Leave one of them out",
        )
    if is_deepspeed and document.zero_stage == 3 and given.get("auto_find_batch_size"):
        what = "auto_find_batch_size cannot be combined with ZeRO-3"
        yield _mismatch(what, raises, "Leave it out, or write stage 2")
    if is_deepspeed and given.get("fsdp"):
        yield _mismatch("--fsdp cannot be combined with DeepSpeed", raises, "Leave one of them out")
    if not is_fsdp:
        return
    if checkpointing.is_asked(given) and _in_fsdp(document, "activation_checkpointing") is True:
        yield _mismatch(
            f"fsdp_activation_checkpointing cannot be combined with --{checkpointing.NAME}",
            raises,
            "Leave one of them out",
        )
    kind, default = _in_fsdp(document, "state_dict_type"), ""
    if not kind and _in_fsdp(document, "version") == 2:
        kind = "SHARDED_STATE_DICT"
        default = "; it is the default if fsdp_state_dict_type is missing under version 2"
    if only_model and str(kind).upper() == "SHARDED_STATE_DICT":
        yield _mismatch(
            "save_only_model cannot be combined with SHARDED_STATE_DICT",
            f"{raises}{default}",
            "Write fsdp_state_dict_type: FULL_STATE_DICT",
        )


def _in_fsdp(document: Document, key: str) -> object:
    found = document.in_accelerate(f"fsdp_config.fsdp_{key}")
    return document.in_accelerate(f"fsdp_config.{key}") if found is None else found


_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")
_SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupCosineLR": "cosine"}


def _replaced(document: Document, training: _Training) -> Iterator[Finding]:
    """Judge a choice in TrainingArguments that a block of the DeepSpeed JSON replaces unsaid."""
    kind, optim = document.in_deepspeed("optimizer.type"), _word(training, "optim")
    is_adam = "adam" in str(kind).lower()
    is_same = optim in _ADAMW if is_adam else str(kind).lower() in optim
    if kind is not None and optim and optim not in _ADAMW[:2] and not is_same:
        yield _overruled("optimizer", kind, f"--optim {optim}")
    kind, schedule = document.in_deepspeed("scheduler.type"), _word(training, "lr_scheduler_type")
    # linear is the default: who has not typed it has it too
    if kind is not None and schedule not in ("", "linear", _SCHEDULES.get(str(kind))):
        yield _overruled("scheduler", kind, f"--lr_scheduler_type {schedule}")


def _word(training: _Training, name: str) -> str:
    found = training.values.get(name)
    return "" if found is None else str(getattr(found, "value", found))


def _overruled(block: str, kind: object, flag: str) -> Finding:
    return _mismatch(
        f"the file's {block}, {kind}, trains instead of {flag}",
        f"transformers' deepspeed_optim_sched takes the block {block} where there is one",
        f"Remove the block {block}, or leave {flag.split()[0]} out",
    )


def _mismatch(summary: str, evidence: str, remedy: str) -> Finding:
    return Finding.error(
        code="config-training-mismatch", summary=summary, evidence=evidence, remedy=remedy
    )


def _fixed(key: str, value: object, unless: str, source: str) -> Finding:
    return Finding.warning(
        code="config-not-auto",
        summary=f"{key} is fixed at {value}: training stops if {unless}",
        evidence=f"the value is {source}; transformers raises at a mismatch",
        remedy=f'Write "{key}": "auto" (in a YAML without JSON: leave it out)',
    )
