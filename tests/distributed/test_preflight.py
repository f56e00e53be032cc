"""Two real processes: a fault of one of them refuses both before step 1, and none refuses neither."""

import json
import os
from pathlib import Path

import pytest

from tests import processes
from tests.distributed.launched import torchrun

ROOT = Path(__file__).parent.parent.parent
SCRIPT = Path(__file__).with_name("refused.py")


def launch(tmp_path: Path, story: str) -> list[dict[str, object]]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = processes.run([*torchrun(2), SCRIPT, tmp_path, story], cwd=tmp_path, environ=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((tmp_path / f"facts-{rank}.json").read_text()) for rank in (0, 1)]


def test_all_ranks_are_refused_together(tmp_path: Path) -> None:
    first, second = launch(tmp_path, "fault")
    assert (first["step"], second["step"], first["world_size"]) == (0, 0, 2)
    assert "[weights-missing]" in str(second["refusal"])
    assert "another rank found why" in str(first["refusal"])


@pytest.mark.all
def test_all_ranks_train_if_none_has_a_fault(tmp_path: Path) -> None:
    for facts in launch(tmp_path, "none"):
        assert (facts["step"], facts["refusal"]) == (1, "")
