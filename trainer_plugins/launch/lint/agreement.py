"""Judge whether a launch file and TrainingArguments agree: conflicts that stop a run, and who wins.

Sources: HfTrainerDeepSpeedConfig, deepspeed_optim_sched, and the checks of Trainer's
create_accelerator_and_postprocess, transformers 5.23.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from trainer_plugins import checkpointing
from trainer_plugins.finding import Finding
from trainer_plugins.launch.lint.document import Document, part

_STOPS_MOST = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "gradient_clipping", "bf16.enabled", "fp16.enabled",
}  # fmt: skip
"""Keys whose fixed value stops most trainings; the others usually agree."""


def read_asked_values(
    values: Mapping[str, object], num_ranks: int | None
) -> dict[str, tuple[str, object]]:
    """Return the TrainingArguments for each key that HfTrainerDeepSpeedConfig compares.

    Each has its name, and its value: None if it is unknown.
    """
    given = {name: value for name, value in values.items() if value is not None}

    def plain(name: str, default: object) -> tuple[str, object]:
        return name, given.get(name, default)

    def precision(name: str) -> tuple[str, object]:
        full = f"{name}_full_eval"
        return (f"{name} or {full}", bool(given.get(name) or given.get(full)))

    steps = _number(values, "max_steps", -1)
    warmup = _number(values, "warmup_steps", 0) or _number(values, "warmup_ratio", 0)
    if 0 < warmup < 1:
        warmup = math.ceil(warmup * steps) if steps > 0 else -1
    betas = [given.get("adam_beta1", 0.9), given.get("adam_beta2", 0.999)]
    rows = None if num_ranks is None else num_ranks * _rows_of_a_rank(values)
    return {
        "train_micro_batch_size_per_gpu": plain("per_device_train_batch_size", 8),
        "gradient_accumulation_steps": plain("gradient_accumulation_steps", 1),
        "train_batch_size": ("the effective batch of all processes", rows),
        "gradient_clipping": plain("max_grad_norm", 1.0),
        "bf16.enabled": precision("bf16"),
        "fp16.enabled": precision("fp16"),
        "optimizer.params.lr": plain("learning_rate", 5e-5),
        "optimizer.params.betas": ("adam_beta1 and adam_beta2", betas),
        "optimizer.params.eps": plain("adam_epsilon", 1e-8),
        "optimizer.params.weight_decay": plain("weight_decay", 0.0),
        "scheduler.params.warmup_max_lr": plain("learning_rate", 5e-5),
        "scheduler.params.total_num_steps": ("max_steps", steps if steps > 0 else None),
        "scheduler.params.warmup_num_steps": (
            "warmup_steps",
            max(1, int(warmup)) if warmup >= 0 else None,
        ),
    }


def _number(values: Mapping[str, object], name: str, default: float) -> float:
    found = values.get(name)
    return found if isinstance(found, (int, float)) else default


def _rows_of_a_rank(values: Mapping[str, object]) -> float:
    rows = _number(values, "per_device_train_batch_size", 8)
    return rows * _number(values, "gradient_accumulation_steps", 1)


def agreement_findings(
    document: Document, values: Mapping[str, object] | None, num_ranks: int | None = None
) -> Iterator[Finding]:
    """Judge a file by TrainingArguments; if they are unknown, by those of most trainings."""
    num_ranks = num_ranks or document.count("num_processes")
    config = _fill_in(document)
    for key, (names, asked) in read_asked_values(values or {}, num_ranks).items():
        value = part(config, key)
        if value is None or value == "auto" or isinstance(value, dict):
            continue
        is_written = part(document.deepspeed or config, key) is not None
        source = "written" if is_written else "filled in by accelerate because it is missing"
        if values is not None:
            yield from _compare(key, value, names, asked, _rows_of_a_rank(values), source)
        elif key in _STOPS_MOST and not (key in ("bf16.enabled", "fp16.enabled") and not value):
            yield _report_fixed(key, value, f"{names} differs", source)
    if values is not None:
        yield from _judge_refusals(document, values)
        yield from _judge_replacements(document, values)


def _fill_in(document: Document) -> dict[str, Any]:
    """Return the DeepSpeed config with the values that accelerate fills in."""
    if document.deepspeed is not None:
        return {"gradient_accumulation_steps": 1, **document.deepspeed}
    names = ("gradient_accumulation_steps", "gradient_clipping")
    written = {name: document.get_accelerate(f"deepspeed_config.{name}") for name in names}
    return {name: value for name, value in written.items() if value is not None}


def _compare(
    key: str, value: object, names: str, wanted: object, rows: float, source: str
) -> Iterator[Finding]:
    if wanted is None and key == "train_batch_size" and isinstance(value, (int, float)) and rows:
        if value % rows == 0:
            yield _report_fixed(key, value, f"there are not {value / rows:.0f} processes", source)
            return
        wanted = f"a multiple of {rows:g}"
    elif wanted is None:
        yield _report_fixed(key, value, "training then takes other steps", source)
        return
    if value != wanted:
        says = "the file says" if source == "written" else "accelerate fills in"
        yield _mismatch(
            f"{key}: {says} {value}, the training arguments say {wanted}",
            f"{key} is {source}, and compared with {names}; transformers stops the training:"
            " values that mismatch TrainingArguments",
            f'Write "{key}": "auto", and set it in TrainingArguments only',
        )


def _judge_refusals(document: Document, given: Mapping[str, object]) -> Iterator[Finding]:
    """Judge combinations that the Trainer refuses when it starts."""
    raises = "the Trainer raises when it starts"
    stage, is_fsdp = document.zero_stage, document.get_accelerate("distributed_type") == "FSDP"
    is_only_model = bool(given.get("save_only_model"))
    loads_best = bool(given.get("load_best_model_at_end")) and (is_fsdp or stage is not None)
    fsdp_checkpoints = is_fsdp and document.get_fsdp("activation_checkpointing") is True
    checkpoints = fsdp_checkpoints and checkpointing.is_asked(given)
    by_the_trainer = f"--{checkpointing.NAME}"
    for are_together, one, other in (
        (is_only_model and loads_best, "save_only_model", "load_best_model_at_end"),
        (stage == 3 and given.get("auto_find_batch_size"), "auto_find_batch_size", "ZeRO-3"),
        (stage is not None and given.get("fsdp"), "--fsdp", "DeepSpeed"),
        (checkpoints, "fsdp_activation_checkpointing", by_the_trainer),
    ):
        if are_together:
            what = f"{one} cannot be combined with {other} under this file"
            yield _mismatch(what, raises, "Leave one of them out")
    kind, default = document.get_fsdp("state_dict_type"), ""
    if not kind and document.get_fsdp("version") == 2:
        kind = "SHARDED_STATE_DICT"
        default = "; it is the default if fsdp_state_dict_type is missing under version 2"
    if is_only_model and is_fsdp and str(kind).upper() == "SHARDED_STATE_DICT":
        yield _mismatch(
            "save_only_model cannot be combined with SHARDED_STATE_DICT",
            f"{raises}{default}",
            "Write fsdp_state_dict_type: FULL_STATE_DICT",
        )


_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")
_SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupCosineLR": "cosine"}


def _judge_replacements(document: Document, given: Mapping[str, object]) -> Iterator[Finding]:
    """Judge choices in TrainingArguments that the DeepSpeed JSON silently replaces."""
    kind, optim = document.get_deepspeed("optimizer.type"), _word(given, "optim")
    is_adam = "adam" in str(kind).lower()
    is_same = optim in _ADAMW if is_adam else str(kind).lower() in optim
    if kind is not None and optim and optim not in _ADAMW[:2] and not is_same:
        yield _report_overruled("optimizer", kind, f"--optim {optim}")
    kind, schedule = document.get_deepspeed("scheduler.type"), _word(given, "lr_scheduler_type")
    # linear is the default, so it may not have been typed
    if kind is not None and schedule not in ("", "linear", _SCHEDULES.get(str(kind))):
        yield _report_overruled("scheduler", kind, f"--lr_scheduler_type {schedule}")


def _word(given: Mapping[str, object], name: str) -> str:
    found = given.get(name)
    return "" if found is None else str(getattr(found, "value", found))


def _report_overruled(block: str, kind: object, flag: str) -> Finding:
    return _mismatch(
        f"the file's {block}, {kind}, trains instead of {flag}",
        f"transformers' deepspeed_optim_sched takes the block {block} where there is one",
        f"Remove the block {block}, or leave {flag.split()[0]} out",
    )


def _mismatch(summary: str, evidence: str, remedy: str) -> Finding:
    return Finding.error(
        code="config-training-mismatch", summary=summary, evidence=evidence, remedy=remedy
    )


def _report_fixed(key: str, value: object, unless: str, source: str) -> Finding:
    return Finding.warning(
        code="config-not-auto",
        summary=f"{key} is fixed at {value}: training stops if {unless}",
        evidence=f"the value is {source}; transformers raises on a mismatch",
        remedy=f'Write "{key}": "auto" (in a YAML without JSON: leave it out)',
    )
