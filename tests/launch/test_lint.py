"""`trainer-plugins configs check`: what it finds, and where it is silent."""

import ast
import inspect
import json
from contextlib import suppress
from pathlib import Path

import pytest

from tests.launch.bad_files import BAD, deepspeed, fsdp, judge_text, zero2, zero3
from tests.models import IS_OLD
from tests.test_cli import command
from trainer_plugins.finding import Severity
from trainer_plugins.launch import configs
from trainer_plugins.launch.lint.agreement import read_asked_values
from trainer_plugins.launch.lint.document import ConfigError, read_document
from trainer_plugins.launch.lint.judge import judge_document
from trainer_plugins.launch.lint.training import training_arguments
from trainer_plugins.launch.main_memory import HostLimits
from trainer_plugins.units import GIB

HARMLESS = {
    "config-deprecated-key", "config-relative-path", "config-ignored-key", "config-bucket-memory",
    "config-gather-on-save", "config-scheduler", "config-elastic-checkpoint", "config-not-auto",
    "config-name", "config-pin-memory",
    "config-process-count j.yaml",  # a flag of the launch may name the address
}  # fmt: skip
"""These launches start, and run as asked or may: all others are errors."""


@pytest.mark.parametrize(
    ("code", "name", "text"), BAD, ids=[f"{code[7:]}-{name}" for code, name, _ in BAD]
)
def test_a_bad_file_is_found(tmp_path: Path, code: str, name: str, text: str) -> None:
    judged = judge_text(tmp_path, name, text)
    found = {each.code: each.severity for each in reversed(judged)}

    assert code in found, found
    is_harmless = not HARMLESS.isdisjoint((code, f"{code} {name}"))
    assert found[code] is (Severity.WARNING if is_harmless else Severity.ERROR)


@pytest.mark.parametrize("text", [zero2(), zero3()])
def test_what_the_bad_files_are_made_of_is_good(tmp_path: Path, text: str) -> None:
    assert not judge_text(tmp_path, "good.json", text)


@pytest.mark.parametrize("name", configs.names())
@pytest.mark.parametrize(
    "words", [None, [], ["--bf16", "--gradient_accumulation_steps", "8", "--save_only_model"]]
)
def test_silence_on_what_is_shipped(name: str, words: list[str] | None) -> None:
    training = None if words is None else training_arguments(words)

    assert not judge_document(
        read_document(configs.path(name)),
        training=training,
        num_params=1e9,
        host=HostLimits(total_bytes=64 * GIB),
    )


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ('"stage3_prefetch_bucket_sise": 5e7', "stage3_prefetch_bucket_size"),
        ('"offload_parm": {"device": "cpu"}', "offload_param"),
        ('"gradient_clipping": 1.0', "Move it to gradient_clipping"),
    ],
)
def test_the_nearest_right_key_is_named(tmp_path: Path, wrong: str, right: str) -> None:
    found = judge_text(tmp_path, "ds.json", zero3(f", {wrong}"))
    assert right in " ".join(finding.remedy for finding in found)


def test_every_pair_that_transformers_compares_is_compared() -> None:
    """`fill_match` compares, `fill_only` and `must_match=False` do not."""
    pytest.importorskip("deepspeed")
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    calls = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(HfTrainerDeepSpeedConfig)))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "fill_match"
    ]
    theirs = {call.args[0].value for call in calls}  # type: ignore[attr-defined]
    assert theirs - {"amp.enabled", "amp.opt_level"} == set(read_asked_values({}, 1))  # of 4: Apex


ADAMW = '"optimizer": {"type": "AdamW", "params": {%s}}, '
WARMUP = '"scheduler": {"type": "WarmupDecayLR", "params": {%s}}, '


@pytest.mark.parametrize(
    ("top", "words"),
    [
        ('"bf16": {"enabled": true}, ', "--bf16"),
        ('"bf16": {"enabled": true}, ', ""),
        ('"bf16": {"enabled": true}, ', "--bf16_full_eval"),
        ('"fp16": {"enabled": false}, ', "--fp16_full_eval"),
        ('"train_micro_batch_size_per_gpu": 4, ', "--per-device-train-batch-size 4"),
        ('"train_micro_batch_size_per_gpu": 4, ', "--per-device-train-batch-size=2"),
        ('"train_micro_batch_size_per_gpu": 4, ', "--auto_find_batch_size True"),
        ('"train_batch_size": 8, ', ""),
        ('"train_batch_size": 64, ', "--gradient_accumulation_steps 8"),
        ('"train_batch_size": 64, ', "--gradient_accumulation_steps 3"),
        (ADAMW % '"lr": 3e-4', "learning_rate=3e-4"),
        (ADAMW % '"lr": 3e-4', ""),
        (ADAMW % '"betas": [0.9, 0.95]', ""),
        (ADAMW % '"betas": [0.9, 0.95]', "--adam_beta2 0.95"),
        (ADAMW % '"eps": 1e-8, "weight_decay": 0.1', ""),
        (ADAMW % '"eps": 1e-6, "weight_decay": 0.0', "--adam_epsilon 1e-6"),
        (WARMUP % '"warmup_max_lr": 5e-5, "warmup_min_lr": 1e-7', ""),
        (WARMUP % '"warmup_max_lr": 2e-5', ""),
        (WARMUP % '"total_num_steps": 100', "--max_steps 100"),
        (WARMUP % '"total_num_steps": 1000', "--max_steps 100"),
        (WARMUP % '"warmup_num_steps": 10', "--max_steps 100 --warmup_steps 10"),
        (WARMUP % '"warmup_num_steps": 10', "--max_steps 100"),
        *(() if IS_OLD else [(WARMUP % '"warmup_num_steps": 1', "--max_steps 100")]),
    ],
)
def test_what_transformers_calls_a_mismatch_is_one(tmp_path: Path, top: str, words: str) -> None:
    pytest.importorskip("deepspeed")
    from transformers import HfArgumentParser, TrainingArguments
    from transformers.integrations import deepspeed

    (tmp_path / "ds.json").write_text(text := zero2(top=top))
    flags = [
        each if each.startswith("--") or "=" not in each else f"--{each}" for each in words.split()
    ]
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        [*flags, "--use_cpu", "--report_to", "none"]
    )
    theirs = deepspeed.HfTrainerDeepSpeedConfig(json.loads(text))
    with suppress(ValueError):
        theirs.trainer_config_process(args)
        theirs.trainer_config_finalize(args, None, args.max_steps)
    deepspeed.unset_hf_deepspeed_config()

    found = judge_document(
        read_document(tmp_path / "ds.json"), training=training_arguments(words.split()), num_ranks=1
    )
    ours = [each.summary for each in found if each.code == "config-training-mismatch"]
    # "- ds optimizer.params.lr=0.0003 vs hf learning_rate=5e-05"
    keys = [each.split("=")[0].removeprefix("- ds ") for each in theirs.mismatches]
    assert sorted(each.split(":")[0] for each in ours) == sorted(keys)


@pytest.mark.parametrize(
    ("file", "words", "num_ranks", "severity", "said"),
    [
        ("batch.json", "", None, Severity.WARNING, "there are not 8 processes"),
        ("batch.json", "", 4, Severity.ERROR, "say 32"),
        ("batch.json", "", 8, None, ""),
        ("batch.json", "--gradient_accumulation_steps 3", None, Severity.ERROR, "a multiple of 24"),
        ("missing.json", "--gradient_accumulation_steps 8", None, Severity.ERROR, "fills in 1"),
        ("batch.yaml", "--per_device_train_batch_size 32", None, None, ""),
        ("batch.yaml", "--bf16 True", 4, Severity.ERROR, "say 32"),
        ("steps.json", "--warmup_steps 0.1", None, Severity.WARNING, "takes other steps"),
        ("adamw.json", "--optim adamw_torch_fused", None, None, ""),
        ("adamw.json", "--optim adafactor", None, Severity.ERROR, "instead of --optim adafactor"),
        ("steps.json", "--lr_scheduler_type linear", None, None, ""),
        ("steps.json", "--lr_scheduler_type cosine", None, Severity.ERROR, "instead of --lr_s"),
        ("zero3.json", "--save_only_model --load_best_model_at_end", None, Severity.ERROR, "cann"),
        ("zero3.json", "--auto_find_batch_size", None, Severity.ERROR, "with ZeRO-3"),
        ("zero2.json", "--auto_find_batch_size", None, None, ""),
        ("zero2.json", "--fsdp full_shard", None, Severity.ERROR, "--fsdp cannot"),
        ("fsdp.yaml", "--gradient_checkpointing True", None, Severity.ERROR, "cannot be combined"),
        ("fsdp.yaml", "--activation_checkpointing True", None, Severity.ERROR, "cannot be combin"),
        ("fsdp.yaml", "--gradient_checkpointing False", None, None, ""),
        ("fsdp.yaml", "--save_only_model", None, Severity.ERROR, "SHARDED_STATE_DICT"),
        ("fsdp.yaml", "--save_only_model --load_best_model_at_end", None, Severity.ERROR, "load_best"),
    ],
)  # fmt: skip
def test_what_the_trainer_refuses_or_overrules(
    tmp_path: Path, file: str, words: str, num_ranks: int | None, severity: Severity, said: str
) -> None:
    batch = zero3(top='"train_batch_size": 64, ')
    files = {
        "batch.json": batch,
        "batch.yaml": deepspeed(f"deepspeed_config_file: '{batch}'"),
        "missing.json": '{"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e7}}',
        "steps.json": zero3(top=ADAMW % '"lr": "auto"' + WARMUP % '"warmup_num_steps": 10'),
        "adamw.json": zero3(top=ADAMW % '"lr": "auto"'),
        "zero2.json": zero2(),
        "zero3.json": zero3(),
        "fsdp.yaml": fsdp("fsdp_version: 2\nfsdp_activation_checkpointing: true"),
    }
    training = training_arguments(words.split())
    judged = judge_text(tmp_path, file, files[file], training=training, num_ranks=num_ranks)

    of_pairs = ("config-training-mismatch", "config-not-auto")
    found = [each for each in judged if each.code in of_pairs]
    if file == "steps.json" and severity is not Severity.WARNING:
        found = [each for each in found if "warmup_num_steps" not in each.summary]
    assert (found[0].severity if found else None) is severity
    assert said in "".join(each.summary for each in found)


@pytest.mark.parametrize(
    ("name", "gib", "found"),
    [
        ("zero3_offload_all", 64, Severity.ERROR),
        ("zero3_offload_all", 128, Severity.ERROR),
        ("zero3_offload_all", 160, Severity.ERROR),  # by what a save gathers
        ("zero3_offload_all", 192, Severity.WARNING),
        ("zero3_offload_all", 224, None),
        ("one_gpu_7b_offload", 64, Severity.ERROR),
        ("one_gpu_7b_offload", 128, Severity.WARNING),
        ("one_gpu_7b_offload", 160, None),
        ("zero3_offload_nvme", 64, Severity.ERROR),
        ("zero3_offload_nvme", 80, Severity.WARNING),
        ("zero3_offload_nvme", 96, None),
        ("zero3", 8, Severity.ERROR),  # weights pass through it at the start
        ("zero3", 32, Severity.WARNING),
        ("zero3", 48, None),
    ],
)
def test_main_memory_for_7b(name: str, gib: int, found: Severity | None) -> None:
    findings = judge_document(
        read_document(configs.path(name)), num_params=6.74e9, host=HostLimits(total_bytes=gib * GIB)
    )

    assert [finding.severity for finding in findings] == ([] if found is None else [found])


@pytest.mark.parametrize(
    ("name", "text"), [("list.yaml", "- a\n- b\n"), ("empty.yaml", ""), ("broken.json", "{'a': 1}")]
)
def test_what_is_no_mapping_is_bad_input(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        judge_text(tmp_path, name, text)
    assert "\n" not in str(refused.value)
    assert command("configs", "check", tmp_path / name).returncode == 2


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(zero3(top='"gradient_cliping": 1.0, '))

    wrong = command("configs", "check", tmp_path / "ds.json")
    right = command(
        "configs",
        "check",
        configs.path("zero3"),
        "--training-args",
        "--bf16 --max_grad_norm 0.3",
        "--params",
        "7e9",
        "--host-memory",
        "1TB",
    )

    assert wrong.returncode == 1
    assert "ERROR [config-unknown-key] gradient_cliping" in wrong.stdout
    assert "gradient_clipping" in wrong.stdout
    assert right.returncode == 0, right.stdout + right.stderr
    assert command("configs", "check", tmp_path / "none.yaml").returncode == 2
