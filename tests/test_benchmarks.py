"""What `scripts/bench` compares is what it says: the rows are launch files, scaled as the model is."""

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.configs import ELEMENTS, OURS, ROWS, rows_with
from trainer_plugins.finding import Severity
from trainer_plugins.launch.lint.document import ConfigError, Document, read_document
from trainer_plugins.launch.lint.judge import judge_document

ROOT = Path(__file__).parent.parent


def launched(name: str, divisor: int, folder: Path) -> Document:
    (folder / "row.yaml").write_text(ROWS[name].launch_file(divisor))
    return read_document(folder / "row.yaml")


@pytest.mark.parametrize("name", ROWS)
def test_a_row_keeps_its_proportions_to_the_model(name: str, tmp_path: Path) -> None:
    full, small = launched(name, 1, tmp_path), launched(name, 8, tmp_path)

    assert not [finding for finding in judge_document(small) if finding.severity >= Severity.ERROR]
    zero, mini = ((found.deepspeed or {})["zero_optimization"] for found in (full, small))
    for key in ELEMENTS:
        assert mini[key] == (zero[key] if zero[key] == "auto" else zero[key] // 64)
    assert {key: mini[key] for key in mini.keys() - ELEMENTS} == {
        key: zero[key] for key in zero.keys() - ELEMENTS
    }


@pytest.mark.parametrize("name", [name for name in ROWS if name.startswith("zero3")])
def test_our_rows_are_the_shipped_files(name: str, tmp_path: Path) -> None:
    row, shipped = (
        launched(name, 1, tmp_path),
        read_document(ROOT / "configs" / "accelerate" / f"{name}.yaml"),
    )
    ran, written = ((found.deepspeed or {})["zero_optimization"] for found in (row, shipped))

    assert ran == {**ELEMENTS, **written}


def test_where_a_file_is_silent_the_values_are_those_of_deepspeed() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    assert DeepSpeedZeroConfig(stage=3).model_dump(by_alias=True).items() >= ELEMENTS.items()


def test_a_value_to_try_is_a_row_and_a_wrong_name_is_refused() -> None:
    word = "zero_optimization.stage3_max_live_parameters=2e8"

    assert (
        rows_with([word])[f"{OURS}, {word}"].deepspeed(1)["zero_optimization"][
            "stage3_max_live_parameters"
        ]
        == 2e8
    )
    with pytest.raises(ConfigError, match="did you mean"):
        rows_with(["zero_optimization.max_live=2e8"])


def test_an_unknown_benchmark_is_refused_before_anything_is_installed() -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "bench", "config"], check=False, capture_output=True, text=True
    )

    assert done.returncode == 2
    there = (
        "there are reading, callbacks, start, configs, check, survival, prediction, sharding,"
        " streaming, traces, dry, fit, house and on_card"
    )
    assert there in done.stderr
