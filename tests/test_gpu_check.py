"""scripts/gpu_check stays alive where there is no card."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


@pytest.mark.all
@pytest.mark.skipif(torch.cuda.is_available(), reason="this is its form without a card")
def test_without_a_card_it_says_so_and_runs_its_cpu_form(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "scripts" / "gpu_check"),
        "--json",
        str(tmp_path / "check.json"),
    ]

    done = subprocess.run(command, check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("no CUDA card here")
    found = json.loads((tmp_path / "check.json").read_text())
    assert found["facts"]["card"] is None
    assert found["facts"]["torch"] == version("torch")
    assert set(found["passed"]) == {"device contract", "benchmark reading"}
    assert all(found["passed"].values())
    assert any(name.startswith("reading_us[") for name in found["figures"])
