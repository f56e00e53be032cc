"""Two real ranks under DDP: each streams a copy of its own, and none does so alone."""

import json
import os
from pathlib import Path

import pytest

from tests import processes
from tests.distributed.launched import torchrun
from trainer_plugins.testing import simgpu
from trainer_plugins.units import MIB

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.all
def test_two_ranks(tmp_path: Path) -> None:
    if (reason := simgpu.unavailable_reason()) is not None:
        pytest.skip(reason)
    card = ("-m", "trainer_plugins.testing.simgpu", "--capacity", "256MiB")
    script = Path(__file__).with_name("two_ranks.py")
    done = processes.run(
        [*torchrun(2), *card, script, tmp_path],
        cwd=tmp_path,
        environ={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-6000:]

    ranks = [json.loads((tmp_path / f"facts-{rank}.json").read_text()) for rank in (0, 1)]
    for facts in ranks:
        for run in facts.values():
            assert run["wrapped"] == "DistributedDataParallel"
            assert (run["device"], run["world_size"]) == ("simgpu", 2)
        assert [run["layers"] for run in facts.values()] == [0, 12, 12]
        resident, streamed, needed = facts.values()
        assert resident["losses"] == streamed["losses"] == needed["losses"]
        assert resident["weights"] == streamed["weights"] == needed["weights"]
        assert resident["peak"] - streamed["peak"] > 25 * MIB
    assert ranks[0]["streamed"]["weights"] == ranks[1]["streamed"]["weights"]
    assert "another rank ran out of memory" in done.stderr  # of rank 0, whose card has room
