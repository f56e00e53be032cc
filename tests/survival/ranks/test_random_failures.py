"""Memory ends at random points, on either of two ranks or both: the step is exact, or all ranks end soon."""

import json
import sys
import time
from pathlib import Path

import pytest

from tests import processes, rounding
from tests.distributed.launched import start
from tests.survival.failing import TERMS
from tests.survival.ranks.test_fsdp2 import IS_REFUSED, WHY_NOT

pytestmark = [pytest.mark.slow, pytest.mark.all]
pytest.importorskip("trl")
if IS_REFUSED:
    pytest.skip(WHY_NOT, allow_module_level=True)

SCRIPT = Path(__file__).with_name("random_failures.py")
NUM_SEEDS = {"DDP": 8, "FSDP1": 8, "FSDP2": 8, "ZeRO-3": 2}
SECONDS = 60.0
"""In which every rank has ended after the first."""


def launched(folder: Path, strategy: str, name: str) -> tuple[list[list[dict]], list[str], float]:
    """Run both ranks without a launcher, which would end one when the other has failed.

    Returns what each wrote and said, and by how much one outlived the other.
    """
    shared = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": processes.free_port(),
    }
    call: list[str | Path] = [
        sys.executable,
        SCRIPT,
        folder,
        strategy,
        name,
        str(NUM_SEEDS[strategy]),
    ]
    both = [
        start(call, folder / str(rank), RANK=str(rank), LOCAL_RANK=str(rank), **shared)
        for rank in (0, 1)
    ]
    while all(process.poll() is None for process in both):
        time.sleep(0.2)
    began = time.monotonic()
    processes.end(*both)
    seconds = time.monotonic() - began
    said = [(folder / str(rank) / "printed.txt").read_text() for rank in (0, 1)]
    files = [folder / f"facts-{rank}.json" for rank in (0, 1)]
    return [json.loads(f.read_text()) if f.is_file() else [] for f in files], said, seconds


@pytest.mark.parametrize("name", ["SFTTrainer", "DPOTrainer", "GRPOTrainer"])
@pytest.mark.parametrize("strategy", NUM_SEEDS)
def test_the_step_is_exact_or_all_ranks_end(tmp_path, strategy: str, name: str, capsys) -> None:
    facts, said, seconds = launched(tmp_path, strategy, name)

    assert seconds <= SECONDS, said[0][-2000:] + said[1][-2000:]
    exact = [one for one in (*facts[0], *facts[1]) if not one["ended"]]
    wrapped = {
        "DDP": "DistributedDataParallel",
        "FSDP1": "FullyShardedDataParallel",
        "FSDP2": "FSDPLlamaForCausalLM",
    }
    assert all(
        one["wrapped"] == wrapped.get(strategy, "DeepSpeedEngine") for f in facts for one in f
    )
    for one in exact:
        assert one["weights"] <= rounding.of_sums(TERMS), "after a step larger than the weights"
        assert one["logged"] <= 2e-6
    with capsys.disabled():
        print(
            f"\n  {strategy}, {name}: {len(exact)} exact, {[f[-1]['ended'][:300] for f in facts if f]}"
        )
    assert exact or strategy == "ZeRO-3", said[0][-2000:]
    if strategy == "ZeRO-3":
        assert any("so all ranks stop, after step 0. There is no checkpoint" in one for one in said)
