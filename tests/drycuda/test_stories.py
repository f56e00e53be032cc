"""The stories of a card, tests/card, on CUDA's own code: all that need no numbers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

pytestmark = [pytest.mark.slow, pytest.mark.all, pytest.mark.usefixtures("cuda_build")]


def test_the_stories_hold(tmp_path: Path) -> None:
    figures = tmp_path / "check.json"
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check"), "--dry", "--json", str(figures)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert json.loads(figures.read_text())["passed"] == {"stories": True}
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("stories"))
    assert " 22 passed" in line, "and none was skipped"
