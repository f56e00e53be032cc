"""A file that is no launch file, by accident or by intent, is refused soon, on one line that says what and where."""

from pathlib import Path

import pytest
import yaml

from tests.launch.bad_files import deepspeed, judge_text
from tests.test_cli import command
from trainer_plugins.launch.lint.training import training_arguments

EIGHT_STEPS = training_arguments(["--gradient_accumulation_steps", "8"])


def anchors(line: str) -> str:
    """Nine levels, each of which refers nine times to the one below: 600 bytes that stand for 387 million values."""
    levels = [
        line.format(level=level, below=", ".join([f"*l{level - 1}"] * 9)) for level in range(1, 10)
    ]
    return "\n".join(["distributed_type: MULTI_GPU", "l0: &l0 {a: 1}", *levels]) + "\n"


HOSTILE = [
    (
        "list.yaml",
        anchors("l{level}: &l{level} [{below}]"),
        "more than 5,000 values once its anchors are followed",
    ),
    (
        "merge.yaml",
        anchors("l{level}: &l{level} {{<<: [{below}]}}"),
        "more than 5,000 values once its anchors",
    ),
    (
        "circle.yaml",
        "distributed_type: MULTI_GPU\nx: &x {y: *x}\n",
        "an anchor that holds itself, in x",
    ),
    ("deep.yaml", "fsdp_config: " + "[" * 3000 + "]" * 3000, "more than 50 nested levels"),
    (
        "less_deep.yaml",
        "fsdp_config: " + "[" * 60 + "]" * 60,
        "more than 50 nested levels",
    ),
    ("deep.json", '{"aio": ' + "[" * 100_000 + "]" * 100_000 + "}", "more than 50 nested levels"),
    (
        "wide.json",
        "{" + ", ".join(f'"key{n}": {n}' for n in range(40_000)) + "}",
        "more than 5,000 values",
    ),
    ("large.yaml", "# x\n" * 300_000, "more than 1 MiB"),
    ("nan.yaml", "distributed_type: MULTI_GPU\nnum_processes: .nan\n", "num_processes is nan"),
    ("nan.json", '{"zero_optimization": {"stage": NaN}}', "zero_optimization.stage is nan"),
    ("huge.json", '{"zero_optimization": {"stage": 1e999}}', "zero_optimization.stage is inf"),
    ("digits.json", '{"x": ' + "9" * 5000 + "}", "digits.json is not JSON: Exceeds the limit"),
    (
        "digits.yaml",
        "num_processes: " + "9" * 400,
        "num_processes is 99999999999999999999..., which is implausible",
    ),
    (
        "more_digits.yaml",
        "num_processes: " + "9" * 5000,
        "more_digits.yaml is not YAML: Exceeds the limit",
    ),
    (
        "date.yaml",
        "num_processes: 2\nmain_process_ip: 2024-13-45\n",
        "date.yaml is not YAML: month must be in 1..12",
    ),
    (
        "latin.yaml",
        "num_processes: 2\n# M\xfcller\n",
        "latin.yaml is not UTF-8: 'utf-8' codec can't decode byte 0xfc in position 20",
    ),
    ("tab.yaml", "num_processes: 2\n\tdebug: true\n", "tab.yaml is not YAML: while scanning"),
]


@pytest.mark.parametrize(("name", "text", "says"), HOSTILE, ids=[name for name, _, _ in HOSTILE])
@pytest.mark.all(but=6)
def test_it_is_refused_on_one_line(tmp_path: Path, name: str, text: str, says: str) -> None:
    if name == "merge.yaml" and yaml.__version__ not in ("6.0.2", "6.0.3"):
        pytest.skip("PyYAML 6.0.4 keeps one value of each merged key")
    file = tmp_path / name
    file.write_text(text, encoding="latin-1")

    done = command("configs", "check", file)  # today's answer takes a second

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"trainer-plugins configs: {file}")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_anchors_as_people_use_them(tmp_path: Path) -> None:
    text = (
        "distributed_type: MULTI_GPU\nnum_machines: &one 1\nmachine_rank: 0\nnum_processes: *one\n"
    )
    assert not judge_text(tmp_path, "two.yaml", text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "{" + '"aio": ' + "[" * 5000 + "]" * 5000 + "}",
            "deepspeed_config_file has more than 50 nested levels",
        ),
        ('{"aio": NaN}', "deepspeed_config_file: aio is nan"),
    ],
)
def test_the_json_inside_is_read_as_carefully(tmp_path: Path, text: str, says: str) -> None:
    judged = judge_text(tmp_path, "a.yaml", deepspeed(f"deepspeed_config_file: '{text}'"))
    (found,) = (each for each in judged if each.code == "config-missing-json")
    assert says in found.evidence


def test_the_json_beside_is_named(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_bytes(b'{"a": "M\xfcller"}')
    text = deepspeed(f"deepspeed_config_file: {tmp_path / 'zero.json'}")
    judged = judge_text(tmp_path, "beside.yaml", text)
    (found,) = (each for each in judged if each.code == "config-missing-json")
    assert "zero.json is not UTF-8: 'utf-8' codec can't decode byte 0xfc" in found.evidence


def test_what_accelerate_leaves_to_the_trainer_is_right(tmp_path: Path) -> None:
    """DeepSpeedPlugin takes the word (accelerate/utils/dataclasses.py), and the Trainer puts its own number there."""
    auto = "zero_stage: 2\ngradient_accumulation_steps: auto\ngradient_clipping: auto"
    found = judge_text(tmp_path, "auto.yaml", deepspeed(auto), training=EIGHT_STEPS)
    assert {each.code for each in found} == {"config-bucket-memory"}


def test_who_says_what_when_they_do_not_agree(tmp_path: Path) -> None:
    four = deepspeed("zero_stage: 2\ngradient_accumulation_steps: 4")
    found = judge_text(tmp_path, "four.yaml", four, training=EIGHT_STEPS)
    (mismatch,) = (each for each in found if each.code == "config-training-mismatch")
    assert (
        mismatch.summary
        == "gradient_accumulation_steps: the file says 4, the training arguments say 8"
    )


def test_parameters_are_counted_in_numbers(tmp_path: Path) -> None:
    file = tmp_path / "good.yaml"
    file.write_text("distributed_type: MULTI_GPU\nnum_processes: 1\n")
    done = command("configs", "check", file, "--params", "inf")

    assert done.returncode == 2
    assert "--params is the number of the model's parameters" in done.stderr
