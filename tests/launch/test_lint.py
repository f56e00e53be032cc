"""`trainer-plugins configs check`: what it finds, and where it is silent."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.bad_files import BAD, zero2, zero3
from tests.test_cli import command
from trainer_plugins.cli.annotations import Format, print_annotations
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.launch import configs
from trainer_plugins.launch.lint import ConfigError, judge, read_document, training_arguments
from trainer_plugins.launch.main_memory import HostLimits
from trainer_plugins.units import GIB


def codes(path: Path, **more) -> set[str]:
    return {finding.code for finding in judge(read_document(path), **more)}


def test_there_are_enough_bad_files() -> None:
    assert len(BAD) >= 40


@pytest.mark.parametrize(
    ("code", "name", "text"), BAD, ids=[f"{code[7:]}-{name}" for code, name, _ in BAD]
)
def test_a_bad_file_is_found(tmp_path: Path, code: str, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)

    assert code in codes(tmp_path / name), [
        str(finding) for finding in judge(read_document(tmp_path / name))
    ]


@pytest.mark.parametrize("text", [zero2(), zero3()])
def test_what_the_bad_files_are_made_of_is_good(tmp_path: Path, text: str) -> None:
    (tmp_path / "good.json").write_text(text)

    assert not judge(read_document(tmp_path / "good.json"))


@pytest.mark.parametrize("name", configs.names())
@pytest.mark.parametrize(
    "words", [None, [], ["--bf16", "--gradient_accumulation_steps", "8", "--save_only_model"]]
)
def test_silence_on_what_is_shipped(name: str, words: list[str] | None) -> None:
    training = None if words is None else training_arguments(words)

    assert not judge(
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
    (tmp_path / "ds.json").write_text(zero3(f", {wrong}"))

    assert right in " ".join(
        finding.remedy for finding in judge(read_document(tmp_path / "ds.json"))
    )


@pytest.mark.parametrize(
    ("top", "words", "clashes"),
    [
        ('"bf16": {"enabled": true}, ', "--bf16", False),
        ('"bf16": {"enabled": true}, ', "--fp16", True),
        ('"fp16": {"enabled": false}, ', "--fp16", True),
        ('"train_micro_batch_size_per_gpu": 4, ', "--per-device-train-batch-size 4", False),
        ('"train_micro_batch_size_per_gpu": 4, ', "--per-device-train-batch-size=2", True),
        ('"optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}, ', "learning_rate=3e-4", False),
        ('"optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}, ', "", True),
    ],
)
def test_training_arguments_that_do_not_agree(
    tmp_path: Path, top: str, words: str, clashes: bool
) -> None:
    (tmp_path / "ds.json").write_text(zero3(top=top))

    found = codes(tmp_path / "ds.json", training=training_arguments(words.split()))

    assert ("config-training-mismatch" in found) is clashes


def test_a_missing_accumulation_is_one_and_clashes_with_eight(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e7}}'
    )

    assert "config-training-mismatch" in codes(
        tmp_path / "ds.json", training=training_arguments(["--gradient_accumulation_steps", "8"])
    )


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
    findings = judge(
        read_document(configs.path(name)), num_params=6.74e9, host=HostLimits(total_bytes=gib * GIB)
    )

    assert [finding.severity for finding in findings] == ([] if found is None else [found])


@pytest.mark.parametrize(
    ("name", "text"), [("list.yaml", "- a\n- b\n"), ("empty.yaml", ""), ("broken.json", "{'a': 1}")]
)
def test_what_is_no_mapping_is_bad_input(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)

    with pytest.raises(ConfigError) as refused:
        judge(read_document(tmp_path / name))
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


TYPOS = """distributed_type: DEEPSPEED
num_processes: 2
num_procesess: 2
deepspeed_config:
  deepspeed_config_file: ds.json
"""


def annotated(folder: Path, form: str, *words: str) -> str:
    (folder / "launch.yaml").write_text(TYPOS)
    (folder / "ds.json").write_text(zero3(top='\n"gradient_cliping": 1.0, '))
    ours = [sys.executable, "-m", "trainer_plugins", *words, "launch.yaml", "--format", form]
    environ = {**os.environ, "CUDA_LAUNCH_BLOCKING": "1"}
    done = subprocess.run(
        ours, cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode in (1, 3), done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "words", [("configs", "check"), ("check", "--accelerate-config")], ids=lambda words: words[0]
)
def test_github_shows_a_finding_at_the_line_of_its_key(words, tmp_path: Path) -> None:
    lines = annotated(tmp_path, "github", *words).splitlines()
    assert all(line.startswith(("::error ", "::warning ", "::notice ")) for line in lines)
    at = "title=config-unknown-key::"
    assert any(each.startswith(f"::error file=launch.yaml,line=3,{at}num_p") for each in lines)
    (beside,) = [each for each in lines if "gradient_cliping" in each]
    number = int(beside.partition("file=ds.json,line=")[2].partition(",")[0])
    assert "gradient_cliping" in (tmp_path / "ds.json").read_text().splitlines()[number - 1]
    if words[0] == "check":
        assert any(each.startswith("::warning title=debug-switch::") for each in lines)


def test_sarif_has_the_same(tmp_path: Path) -> None:
    (run,) = json.loads(annotated(tmp_path, "sarif", "configs", "check"))["runs"]
    rules = {each["id"] for each in run["tool"]["driver"]["rules"]}
    assert {each["ruleId"] for each in run["results"]} == rules >= {"config-unknown-key"}
    (place,) = run["results"][0]["locations"]
    assert place["physicalLocation"]["artifactLocation"]["uri"] == "launch.yaml"
    assert place["physicalLocation"]["region"]["startLine"] == 3


def test_what_github_would_read_as_its_own_is_escaped(capsys: pytest.CaptureFixture) -> None:
    found = Finding.error(code="config-x", summary="50%\n::error::x", evidence="", remedy="")
    print_annotations(Format.GITHUB, [found], ())
    assert capsys.readouterr().out == "::error title=config-x::50%25%0A::error::x (). \n"
